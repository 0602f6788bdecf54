"""torch.compile around, instead of, or inside planned blocks: refused by name, never run with the plan passed over.

Hooks on saved tensors see what a compiled graph saves, which no block graph describes, and code that is compiled around
them does not call them at all.
"""

from __future__ import annotations

import torch
from torch import nn

from hilore_plan.errors import RefusedError
from hilore_plan.graph.blocks import NamedBlocks

# not in every torch from 2.6 on
_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)

_HINT = (
    "train without torch.compile on what holds the blocks, or without a plan; what lies outside of them, as the head "
    "or the loss, may be compiled by itself"
)


def refuse_compiled(model: nn.Module, blocks: NamedBlocks) -> None:
    """Refuse blocks that are compiled, alone or as a part of a module that is.

    Raises:
        RefusedError: naming the compiled module.
    """
    inside = {id(module) for _, block in blocks for module in block.modules()}
    planned = {id(block): name for name, block in blocks}
    for name, module in model.named_modules():
        if id(module) in inside:
            if id(module) in planned and _is_compiled(module):
                raise RefusedError(f"block {planned[id(module)]} is compiled by torch.compile", _HINT)
        elif _is_compiled(module) and any(id(part) in planned for part in module.modules()):
            shown = f"{type(module).__name__} {name}".rstrip()
            raise RefusedError(f"{shown} is compiled by torch.compile, with the planned blocks in it", _HINT)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def refuse_compiled_around(name: str) -> None:
    """Refuse to run a planned block from compiled code, while that is traced or later.

    Raises:
        RefusedError: something around the block is compiled.
    """
    if torch.compiler.is_compiling():
        # with fullgraph=True torch ends here, and shows the text; else it runs the next line without compiling it
        torch._dynamo.graph_break(msg=f"hilore: block {name} has a plan. {_HINT}")
        raise _refused(name)
    if is_compiled_around():
        raise _refused(name)


def is_compiled_around() -> bool:
    """Whether torch.compile takes over the frames that are called from here.

    torch 2.13 leaves a frame that it could not trace to Python, and goes on with those that it calls.
    """
    return _callback is not None and _callback() is not None


def _refused(name: str) -> RefusedError:
    return RefusedError(f"block {name} is compiled by torch.compile, or is a part of something that is", _HINT)
