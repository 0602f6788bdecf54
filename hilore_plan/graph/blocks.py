"""Find the repeated blocks of a model: the modules that gradient checkpointing would checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from hilore_plan.errors import UsageError

NamedBlocks = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module, blocks: Sequence[str | nn.Module] | None = None) -> NamedBlocks:
    """The model's repeated blocks with their names, in order.

    Without `blocks` these are the children of the outermost list of equal modules that holds the most parameters: also
    inside PEFT, DDP and FSDP2 wrappers, which leave that list in place.

    Args:
        model: any module.
        blocks: names or modules to take instead.

    Raises:
        UsageError: a listed block is not part of the model, or none can be found.
    """
    if blocks is not None:
        return [_named(model, block) for block in blocks]
    found = max(_repeated(model, ""), key=lambda blocks: sum(map(_size, dict(blocks).values())), default=[])
    if not found:
        raise UsageError(
            f"no repeated blocks found in {type(model).__name__}",
            "name them: apply(model, plan, blocks=['layers.0', 'layers.1', ...])",
        )
    return found


def _named(model: nn.Module, block: str | nn.Module) -> tuple[str, nn.Module]:
    for name, module in model.named_modules():
        if module is block or name == block:
            return name, module
    shown = block if isinstance(block, str) else type(block).__name__
    raise UsageError(f"block {shown!r} is not a module of {type(model).__name__}", "give names as in named_modules()")


def _repeated(module: nn.Module, name: str) -> Iterator[NamedBlocks]:
    """The lists of equal modules below `module`, without those inside another such list."""
    prefix = f"{name}." if name else ""
    children = [(prefix + child_name, child) for child_name, child in module.named_children()]
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and _are_alike([child for _, child in children]):
        yield children
        return
    for child_name, child in children:
        yield from _repeated(child, child_name)


def _are_alike(modules: list[nn.Module]) -> bool:
    """Several modules of one class that hold parameters, and are more than single layers."""
    kinds = {type(module) for module in modules}
    return len(kinds) == 1 and all(_size(module) and any(module.children()) for module in modules)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
