"""What codecs cost and lose: time for 8 M elements beside the matmul that makes them, and errors beside bytes.

Run `python benchmarks/codecs.py`. The matmul is the up-projection of a model of hidden size 768, which is
`[2731, 768] x [768, 3072]`. Rounds of all contestants are interleaved; medians. No time is printed of a
codec whose compiled form differs from its formula. Ends with code 1 if int8 takes more than a third of the matmul.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hilore_plan.codecs.base import decode, encode
from hilore_plan.codecs.grouped import GroupCodec
from hilore_plan.codecs.registry import CODECS, FORMATS
from hilore_plan.profiler.clock import seconds_of
from hilore_plan.profiler.malloc import reexec_with_malloc_settings

HIDDEN, WIDE, TOKENS = 768, 3072, 2731
LIMIT = 1 / 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One codec's median seconds."""

    name: str
    encode_seconds: float
    decode_seconds: float


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    reexec_with_malloc_settings()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    slow = [dtype for dtype in (torch.bfloat16, torch.float32) if not times(dtype, options.rounds)]
    errors()
    return int(bool(slow))


def times(dtype: torch.dtype, rounds: int) -> bool:
    """The table of times for one dtype; whether int8 is within its limit."""
    inputs, weight = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(HIDDEN, WIDE).to(dtype)
    product = inputs @ weight
    check(product)
    matmul, rows = measure(product, lambda: inputs @ weight, rounds)
    print(f"\n{dtype}: {product.numel() / 1e6:.2f} M elements; their matmul takes {matmul * 1e3:.1f} ms")
    print(f"{'codec':14}{'encode ms':>11}{'decode ms':>11}{'encode GB/s':>13}{'decode GB/s':>13}{'of matmul':>11}")
    for row in rows:
        speeds = [product.nbytes / seconds / 1e9 for seconds in (row.encode_seconds, row.decode_seconds)]
        share = (row.encode_seconds + row.decode_seconds) / matmul
        print(
            f"{row.name:14}{row.encode_seconds * 1e3:11.2f}{row.decode_seconds * 1e3:11.2f}"
            f"{speeds[0]:13.2f}{speeds[1]:13.2f}{share:11.1%}"
        )
    int8 = next(row for row in rows if row.name == "int8")
    return int8.encode_seconds + int8.decode_seconds <= LIMIT * matmul


def check(tensor: Tensor) -> None:
    """Raise if a compiled form gives other bits than its formula."""
    flat = tensor.view(-1)[: 2**20]
    for form in FORMATS:
        one, other = (codec.encode_flat(flat) for codec in (CODECS[form.name], GroupCodec(form)))
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True)):
            raise SystemExit(f"{form.name}: compiled and formula differ; no times are printed")


def measure(product: Tensor, matmul: Callable[[], Tensor], rounds: int) -> tuple[float, list[Row]]:
    """Median seconds of the matmul, and of each codec."""
    encoded = {form.name: encode(CODECS[form.name], product) for form in FORMATS}
    taken: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        taken.setdefault("matmul", []).append(seconds_of(matmul, CPU))
        for name, kept in encoded.items():
            coding = seconds_of(lambda name=name: encode(CODECS[name], product), CPU)
            taken.setdefault(f"encode {name}", []).append(coding)
            taken.setdefault(f"decode {name}", []).append(seconds_of(lambda kept=kept: decode(kept), CPU))
    middle = {what: statistics.median(seconds[1:]) for what, seconds in taken.items()}
    return middle["matmul"], [Row(name, middle[f"encode {name}"], middle[f"decode {name}"]) for name in encoded]


def errors() -> None:
    """The table of relative root-mean-square errors, beside the bits of an element."""
    data = numbers()
    print("\nrelative RMS error, float32")
    print(f"{'codec':14}{'bits':>7}" + "".join(f"{name:>15}" for name in data))
    for form in FORMATS:
        bits = form.group_bytes * 8 / form.group
        found = [relative_error(form.name, tensor) for tensor in data.values()]
        print(f"{form.name:14}{bits:7.3f}" + "".join(f"{error:15.5f}" for error in found))


def numbers() -> dict[str, Tensor]:
    """What errors are measured on: `[8192, 128]` each."""
    torch.manual_seed(0)
    normal = torch.randn(8192, 128)
    outlying = normal.clone()
    outlying[torch.arange(8192), torch.arange(8192) % 128] *= 1e4
    heavy = torch.randn(8192, 128) / torch.randn(3, 8192, 128).square().mean(0).sqrt()
    return {
        "normal": normal,
        "normal + 1": normal + 1,
        "silu(normal)": torch.nn.functional.silu(normal),
        "silu x up": torch.nn.functional.silu(normal) * torch.randn(8192, 128),
        "student t 3": heavy,
        "outliers": outlying,
    }


def relative_error(name: str, tensor: Tensor) -> float:
    """The root mean square of the error relative to that of the tensor."""
    error = decode(encode(CODECS[name], tensor)) - tensor
    return (error.square().mean() / tensor.square().mean()).sqrt().item()


if __name__ == "__main__":
    sys.exit(main())
