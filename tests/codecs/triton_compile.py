"""Run by `test_triton.py` in its own process: every kernel compiled to machine code for CUDA devices, without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hilore_plan.codecs.format import Format
from hilore_plan.codecs.format_triton import ELEMENTS
from hilore_plan.codecs.registry import FORMATS

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
CAPABILITIES = (80, 90)


def kernels(form: Format) -> Iterator[Any]:
    """The two kernels of a format: the functions of the formulas' names launch those with an underscore before it."""
    module = import_module(f"{form.encode.__module__}_triton")
    for formula in (form.encode, form.decode):
        yield getattr(module, f"_{formula.__name__}")


def source(kernel: Any, form: Format, dtype: torch.dtype) -> ASTSource:
    pointers = {"codes": "*i32" if form.codes == torch.int32 else "*u8", "scales": "*bf16", "zeros": "*u8"}
    known = {"x": POINTERS[dtype], "out": POINTERS[dtype], "count": "i32", **pointers}
    end = torch.finfo(dtype).max
    values = {"rows": ELEMENTS // form.width, "group": form.group, "width": form.width, "end": end}
    constants = {name: value for name, value in values.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants)


if __name__ == "__main__":
    for form in FORMATS:
        for kernel in kernels(form):
            for dtype in POINTERS:
                for capability in CAPABILITIES if dtype == torch.bfloat16 else CAPABILITIES[:1]:
                    target = GPUTarget("cuda", capability, 32)
                    made = triton.compile(
                        source(kernel, form, dtype), target=target, options={"enable_fp_fusion": False}
                    )
                    if not made.asm["cubin"]:
                        sys.exit(f"{form.name} {kernel.__name__} {dtype}: nothing for {target}")
    print("compiled")  # noqa: T201
