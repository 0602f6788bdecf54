"""Run by `test_triton.py` in its own process, with Triton's interpreter on: kernels against formulas, bit for bit."""

from __future__ import annotations

import sys
from importlib import import_module

import codec_rows as rows
import torch
import triton
import triton.language as tl

from hilore_plan.codecs.format import Format
from hilore_plan.codecs.format_triton import places
from hilore_plan.codecs.registry import FORMATS


def check(form: Format, dtype: torch.dtype) -> None:
    """Raise if the kernels give other codes, scales or numbers than the formulas."""
    kernels = import_module(f"{form.encode.__module__}_triton")
    for name, data in rows.DATA.items():
        groups = data(form.group, dtype)
        parts, expected = (tuple(poison(part) for part in form.allocate(groups.numel(), groups.device)) for _ in "12")
        getattr(kernels, form.encode.__name__)(groups, *parts)
        form.encode(groups, *expected)
        same(f"{form.name} {dtype} {name}: codes", parts, expected)
        compare_decoded(kernels, form, groups, parts, name)
    spoilt = rows.spoilt(form.group, dtype)
    parts = form.allocate(spoilt.numel(), spoilt.device)
    getattr(kernels, form.encode.__name__)(spoilt, *parts)
    compare_decoded(kernels, form, spoilt, parts, "spoilt")


def compare_decoded(
    kernels: object, form: Format, groups: torch.Tensor, parts: tuple[torch.Tensor, ...], name: str
) -> None:
    out, expected = torch.full_like(groups, 7), torch.full_like(groups, 8)
    getattr(kernels, form.decode.__name__)(*form.runs_of(out), *parts)
    form.decode(*form.runs_of(expected), *parts)
    if not torch.equal(out.isnan(), expected.isnan()):
        raise SystemExit(f"{form.name} {groups.dtype} {name}: not NaN in the same places")
    if name == "spoilt" and out[~groups.isfinite()].isfinite().any():
        raise SystemExit(f"{form.name} {groups.dtype}: what is not finite came back finite")
    same(f"{form.name} {groups.dtype} {name}: decoded", (out.nan_to_num(),), (expected.nan_to_num(),))


def poison(part: torch.Tensor) -> torch.Tensor:
    part.view(torch.uint8).fill_(0x7F)
    return part


def same(what: str, one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            raise SystemExit(f"{what} differ")


@triton.jit
def _offsets(out, rows_: tl.constexpr, group: tl.constexpr):
    row, at = places(group, rows_)
    tl.store(out + tl.arange(0, rows_), row + 0)
    tl.static_assert(at.dtype == tl.int64)
    tl.store(out, tl.max(tl.max(at + 2147483648, 1), 0))


if __name__ == "__main__":
    for form in FORMATS:
        for dtype in rows.DTYPES:
            check(form, dtype)
    out = torch.zeros(4, dtype=torch.int64)
    _offsets[(1,)](out, 4, 16)
    if out[0] != 2**31 + 63:
        sys.exit("offsets are cut to 32 bits")
    print("equal")  # noqa: T201
