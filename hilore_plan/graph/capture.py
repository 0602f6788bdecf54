"""Capture one call of a block as a symbolic ATen graph, every saved tensor attributed to the node that made it.

The forward runs once on fake tensors: nothing is computed, and no state of the block changes. Sizes of activations are
symbols, so one graph serves every batch size and length that meets its guards.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map

from hilore_plan.errors import CaptureError
from hilore_plan.graph.labels import Labels
from hilore_plan.graph.signature import Call

Forward = Callable[..., Any]
_FRESH = torch.ops.aten.lift_fresh_copy.default
DROPOUT_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@dataclass(frozen=True)
class SavedSlot:
    """One saved tensor: the node it is, and a node that stands where autograd saved it."""

    node: fx.Node
    saved: fx.Node


@dataclass(frozen=True)
class Capture:
    """A block's forward as a graph.

    `module` takes the parameters, buffers and tensor arguments in the order of `state_names` and of the call's tensors,
    as its placeholders say, and returns the block's tensor outputs and then the slots.
    """

    module: fx.GraphModule
    slots: tuple[SavedSlot, ...]
    state_names: tuple[str, ...]
    state_nodes: tuple[fx.Node, ...]
    input_names: tuple[str, ...]
    input_nodes: tuple[fx.Node, ...]
    shape_env: ShapeEnv
    guards: str | None

    def fits(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether a call with these tensors (of the same signature) runs the same graph."""
        return self.guards is None or bool(self.shape_env.evaluate_guards_expression(self.guards, tensors))

    def placeholder_values(self, block: nn.Module, call: Call) -> list[torch.Tensor]:
        """The inputs of `module`, in order, for one call of one block."""
        state = block_state(block)
        return [*(state[name] for name in self.state_names), *call.tensors]


def block_state(block: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a block by name, each once."""
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def capture(block: nn.Module, call: Call, forward: Forward | None = None) -> Capture:
    """Capture `forward` (the block's own by default) as it would run for `call`.

    Raises:
        CaptureError: the forward looks at the values of tensors, uses what cannot be traced, or fails on fake tensors.
    """
    call.structure_key()
    try:
        with _unchanged(block), _dropout_as_in_eager_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _aside().run(_capture, block, call, forward or block.forward)
    except CaptureError:
        raise
    except Exception as error:  # whatever user code or the tracer raises: the block cannot be captured
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "dynamo-optimized" in reason:  # as torch 2.13 puts it
            reason = "it calls code that torch.compile has compiled, in which no tensor can be followed"
        raise CaptureError(f"{type(block).__name__}: {reason[:200]}") from error


class _Forward(nn.Module):
    """The block as a module of one's own, so that parameters can be replaced without going through its `__call__`."""

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.block = block
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _capture(block: nn.Module, call: Call, forward: Forward) -> Capture:
    # duck_shape off: two sizes that happen to agree in the example call must not be taken for one
    shape_env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    state = {name: _fake_state(mode, tensor) for name, tensor in block_state(block).items()}
    inputs = [_fake_input(mode, tensor, f"t{i}") for i, tensor in enumerate(call.tensors)]
    slots: list[SavedSlot] = []
    runner = _Forward(block, forward)

    def run(state_values: dict[str, torch.Tensor], input_values: list[torch.Tensor]) -> list[torch.Tensor]:
        proxy_mode = get_innermost_proxy_mode()
        assert proxy_mode is not None
        tracer = proxy_mode.tracer
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # returned by the graph too, so that no slot is dead code
            saved.append(tensor.detach())
            slots.append(SavedSlot(_node_of(tensor, tracer), _node_of(saved[-1], tracer)))
            return tensor

        args, kwargs = call.rebuild(input_values)
        named = {f"block.{name}": value for name, value in state_values.items()}
        with Labels(block).follow(tracer.graph), saved_tensors_hooks(pack, lambda tensor: tensor):
            output = torch.func.functional_call(runner, named, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]
        return [*outputs, *saved]

    with torch.enable_grad():
        module = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(state, inputs)
    _refuse_constants(module, block)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    guards = shape_env.produce_guards_expression(inputs, ignore_static=True)
    return Capture(
        module=module,
        slots=tuple(slots),
        state_names=tuple(state),
        state_nodes=tuple(placeholders[: len(state)]),
        input_names=input_names(call, forward),
        input_nodes=tuple(placeholders[len(state) :]),
        shape_env=shape_env,
        guards=guards or None,
    )


def _node_of(tensor: torch.Tensor, tracer: Any) -> fx.Node:
    proxy = get_proxy_slot(tensor, tracer, None)
    if proxy is None:
        raise CaptureError("a saved tensor does not come from the traced operations")
    node: fx.Node = proxy.proxy.node
    return node


def _refuse_constants(module: fx.GraphModule, block: nn.Module) -> None:
    """A tensor from elsewhere would stay in the graph, although the block may get another one or write into it.

    What a forward makes itself, as `torch.tensor(0.5)`, is copied first.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr" and any(user.target is not _FRESH for user in node.users):
            constant = getattr(module, str(node.target))
            names = (
                f"{path}.{name}".lstrip(".")
                for path, owner in block.named_modules()
                for name, value in vars(owner).items()
                if value is constant
            )
            which = next(names, f"of shape {list(constant.shape)}")
            raise CaptureError(f"it computes with a tensor ({which}) that is no parameter, buffer or argument")


def _fake_state(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    _refuse_subclass(tensor, "parameter")
    fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def _fake_input(mode: FakeTensorMode, tensor: torch.Tensor, name: str) -> FakeTensor:
    """A fake of the same layout with a symbol for each size above one."""
    from torch._dynamo.source import LocalSource

    _refuse_subclass(tensor, "argument")
    # a tensor of its own: the fake of a view would bring its base, and the base's symbols, along
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    sizes = [DimDynamic.STATIC if size <= 1 else DimDynamic.DYNAMIC for size in tensor.shape]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=sizes)
    fake = mode.from_tensor(layout, symbolic_context=context, source=LocalSource(name))
    return fake.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def _refuse_subclass(tensor: torch.Tensor, what: str) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter) and not isinstance(tensor, nn.Buffer):
        raise CaptureError(f"{what} of tensor subclass {type(tensor).__name__}")


def input_names(call: Call, forward: Forward) -> tuple[str, ...]:
    """A readable name for each tensor argument: that of the forward's parameter, and the path inside containers."""
    args, kwargs = call.rebuild([torch.empty(0)] * len(call.positions))
    parameters = _parameter_names(forward)
    named = {**{_positional(parameters, i): value for i, value in enumerate(args)}, **kwargs}
    # the leaves of (args, kwargs) in their order, each with its path
    paths = [path for path, _ in tree_leaves_with_path(named)]
    return tuple(_input_name(paths[position]) for position in call.positions)


def _parameter_names(forward: Forward) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds and p.name != "self"]


def _positional(names: list[str], index: int) -> str:
    return names[index] if index < len(names) else str(index)


def _input_name(path: Any) -> str:
    keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
    return ".".join(["input", *keys])


@contextmanager
def _dropout_as_in_eager_mode() -> Iterator[None]:
    """Trace dropout as the device runs it.

    torch 2.13's tracer replaces `aten.dropout` by `native_dropout`, which saves a bool mask. That is what CUDA runs; on
    a CPU, dropout multiplies by a noise tensor and saves that.
    """
    dropout = torch.ops.aten.dropout.default
    replaced = {key: dropout.py_kernels.pop(key) for key in DROPOUT_KEYS if key in dropout.py_kernels}
    dropout._dispatch_cache.clear()
    try:
        yield
    finally:
        dropout.py_kernels.update(replaced)
        dropout._dispatch_cache.clear()


def _aside() -> Context:
    """A context whose containers are copies.

    transformers 5.24 collects router logits by hooks that append to a list in a context variable: what they append
    during capture has no numbers, and must not end up in the loss.
    """
    context = copy_context()
    for variable, value in list(context.items()):
        if isinstance(value, (dict, list)):
            context.run(variable.set, tree_map(lambda leaf: leaf, value))
    return context


@contextmanager
def _unchanged(block: nn.Module) -> Iterator[None]:
    """Undo what the traced forward does to attributes of modules (counters, caches)."""
    modules: list[tuple[nn.Module, Mapping[str, Any]]] = [(m, copy.copy(vars(m))) for m in block.modules()]
    inner = [(m, name, copy.copy(vars(m)[name])) for m, _ in modules for name in ("_buffers", "_parameters")]
    try:
        yield
    finally:
        for module, before in modules:
            vars(module).clear()
            vars(module).update(before)
        for module, name, before in inner:
            vars(module)[name].clear()
            vars(module)[name].update(before)
