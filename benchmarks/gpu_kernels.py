"""The codecs' Triton kernels against their formulas, bit for bit: on CUDA, or in Triton's interpreter on a CPU.

Run by `gpu_check.py` in a process of its own: the interpreter is chosen when triton is imported, and a kernel that
writes where it must not would spoil everything after it. Prints a line for each format; ends with code 1 if one
differs.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from hilore_plan.codecs.base import decode, encode
from hilore_plan.codecs.format import Format
from hilore_plan.codecs.grouped import GroupCodec
from hilore_plan.codecs.registry import CODECS, FORMATS
from hilore_plan.profiler.clock import interleaved_seconds

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = 67  # no multiple of what one program takes
FAR = 2**31
FAR_BYTES = 16 * 2**30
TIMED_ELEMENTS = 2**26


def numbers(form: Format, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the kernels are tried on, `[GROUPS, group]` each."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(GROUPS, form.group, generator=generator)
    end = torch.finfo(dtype).max
    spoilt = normal.clone()
    spoilt[::5, 3], spoilt[1::5, 1], spoilt[2::5, 0] = torch.nan, torch.inf, -torch.inf
    data = {
        "normal": normal,
        "of one sign": normal.abs() + 1,
        "wide": normal * 10.0 ** torch.randint(-30, 4, (GROUPS, 1), generator=generator),
        "at the end": (normal.sign() * end).clamp(-end, end),
        "zero": torch.zeros(GROUPS, form.group),
        "constant": torch.full((GROUPS, form.group), 0.3),
        "not finite": spoilt,
    }
    return {name: values.to(dtype) for name, values in data.items()}


def differences(form: Format, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Where the kernels give something else than the formulas do on a CPU; codes of what is not finite are free."""
    kernels = import_module(f"{form.encode.__module__}_triton")
    for name, groups in numbers(form, dtype).items():
        parts, expected = form.allocate(groups.numel(), device), form.allocate(groups.numel(), groups.device)
        run(kernels, form.encode, groups.to(device), *parts)
        form.encode(groups, *expected)
        if name != "not finite" and not all(map(same_bits, parts, expected)):
            yield f"{dtype}, {name}: encoded"
        out, wanted = torch.full_like(groups, 7, device=device), torch.full_like(groups, 8)
        run(kernels, form.decode, *form.runs_of(out), *(part.to(device) for part in expected))
        form.decode(*form.runs_of(wanted), *expected)
        if not same_numbers(out, wanted):
            yield f"{dtype}, {name}: decoded"


def run(kernels: ModuleType, formula: Callable[..., None], *tensors: Tensor) -> None:
    """The kernel of a formula's name."""
    getattr(kernels, formula.__name__)(*tensors)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, of whatever devices, agree in every bit."""
    return torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """The same, but a NaN is a NaN."""
    one, other = one.cpu(), other.cpu()
    return torch.equal(one.isnan(), other.isnan()) and same_bits(one.nan_to_num(), other.nan_to_num())


def layouts(device: torch.device) -> dict[str, Tensor]:
    """Tensors as blocks save them: odd sizes, transposed, expanded, with gaps."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(5, 37, 131, generator=generator).to(device, torch.bfloat16)
    return {
        "odd": base,
        "transposed": base.transpose(0, 2),
        "with gaps": base[:, ::2],
        "expanded": base[:1].expand(4, 37, 131),
        "one element": base[0, 0, :1],
        "empty": base[:0],
    }


def codec_differences(form: Format, device: torch.device) -> Iterator[str]:
    """Where the codec, kernels and all, gives something else on the device than its formulas on a CPU."""
    for name, tensor in layouts(device).items():
        found, wanted = decode(encode(CODECS[form.name], tensor)), decode(encode(GroupCodec(form), tensor.cpu()))
        if found.stride() != wanted.stride() or not same_numbers(found, wanted):
            yield f"a tensor {name}"


def far_differences(form: Format, device: torch.device) -> Iterator[str]:
    """Whether groups beyond 2^31 elements are written where they belong."""
    count = FAR // form.group + 3
    last = numbers(form, torch.bfloat16)["normal"][:3]
    groups = torch.zeros((count, form.group), dtype=torch.bfloat16, device=device)
    groups[-3:] = last.to(device)
    parts = CODECS[form.name].encode_flat(groups.view(-1))
    del groups
    wanted = GroupCodec(form).encode_flat(last.reshape(-1))
    if not all(same_bits(part[-3:], right) for part, right in zip(parts, wanted, strict=True)):
        yield "encoded beyond 2^31 elements"
    out = CODECS[form.name].decode_flat(parts, count * form.group, torch.bfloat16)
    if not same_bits(out[-3 * form.group :], GroupCodec(form).decode_flat(wanted, 3 * form.group, torch.bfloat16)):
        yield "decoded beyond 2^31 elements"


def speed(form: Format, device: torch.device) -> str:
    """What a codec does with a large tensor."""
    tensor = torch.randn(TIMED_ELEMENTS, device=device, dtype=torch.bfloat16)
    kept = encode(CODECS[form.name], tensor)
    works = [lambda: encode(CODECS[form.name], tensor), lambda: decode(kept)]
    seconds = map(statistics.median, interleaved_seconds(works, device, rounds=5))
    rates = [tensor.nbytes / each / 1e9 for each in seconds]
    return f"{form.name}: encodes {rates[0]:.0f} and decodes {rates[1]:.0f} GB of bfloat16 a second"


def main() -> int:
    """Every format on the device that is there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("without CUDA the kernels need TRITON_INTERPRET=1")
    failed = False
    for form in FORMATS:
        wrong = [each for dtype in DTYPES for each in differences(form, dtype, device)]
        if device.type == "cuda":
            wrong += codec_differences(form, device)
            if torch.cuda.mem_get_info()[0] > FAR_BYTES and not wrong:
                wrong += far_differences(form, device)
                torch.cuda.empty_cache()
        failed = failed or bool(wrong)
        print(f"  {'NOT MET' if wrong else 'met    '} kernels of {form.name} give what its formulas give", flush=True)
        for each in wrong:
            print(f"            differ: {each}", flush=True)
        if device.type == "cuda" and not wrong:
            print(f"          {speed(form, device)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
