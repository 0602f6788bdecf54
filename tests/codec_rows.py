"""What every codec is tried on: layouts of tensors, and groups of numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ELEMENTS = 4 * 6 * 130

Shape = Callable[[Tensor], Tensor]

# from `[4, 6, 130]`: dense in any order, and expanded, come back with their strides
DENSE: dict[str, Shape] = {
    "contiguous": lambda x: x,
    "flat": lambda x: x.view(-1),
    "whole groups": lambda x: x.view(-1)[:1280],
    "one group": lambda x: x.view(-1)[:128],
    "less than a group": lambda x: x.view(-1)[:37],
    "one element": lambda x: x.view(-1)[5:6],
    "no dimension": lambda x: x[1, 2, 3],
    "empty": lambda x: x[:0],
    "empty last": lambda x: x[..., :0],
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "an odd place in memory": lambda x: x.view(-1)[3:1003].view(10, 100),
    "ones between": lambda x: x[:, None, :, None].transpose(0, 3),
    "expanded": lambda x: x[:, :1].contiguous().expand(4, 5, 130),
    "expanded and transposed": lambda x: x[0, :1].expand(7, 130).t(),
    "expanded scalar": lambda x: x[0, 0, 0].expand(3, 4),
    "channels last": lambda x: x.view(2, 4, 30, 13).to(memory_format=torch.channels_last),
}

# views with gaps or overlaps come back with the same values in a row
GAPS: dict[str, Shape] = {
    "every second": lambda x: x[:, ::2],
    "narrowed": lambda x: x[..., 3:101],
    "narrowed and permuted": lambda x: x[:, 1:4, 5:].permute(2, 0, 1),
    "narrowed and expanded": lambda x: x[:, :1, 2:].expand(4, 3, 128),
    "overlapping windows": lambda x: x.view(-1).unfold(0, 16, 4),
    "diagonal": lambda x: x[0, :, :6].diagonal(),
}


def elements(dtype: torch.dtype) -> Tensor:
    """Numbers for the layouts, `[4, 6, 130]`; as they are representable in bfloat16, every codec takes them."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 6, 130, generator=generator).bfloat16().to(dtype)


def gaussian(rows: int, group: int) -> Tensor:
    """Standard normal numbers, `[rows, group]`, float32."""
    return torch.randn(rows, group, generator=torch.Generator().manual_seed(11))


def heavy_tailed(rows: int, group: int) -> Tensor:
    """Student's t with 3 degrees of freedom: a normal number over the root of a mean of three squares."""
    generator = torch.Generator().manual_seed(12)
    squares = torch.randn(3, rows, group, generator=generator).square().mean(0)
    return torch.randn(rows, group, generator=generator) / squares.sqrt()


def massive(rows: int, group: int) -> Tensor:
    """Normal numbers, one in each group 10,000 times as large."""
    numbers = gaussian(rows, group)
    numbers[torch.arange(rows), torch.arange(rows) % group] *= 1e4
    return numbers


def odd_groups(group: int, dtype: torch.dtype) -> Tensor:
    """Groups at the ends of what `dtype` can hold, `[n, group]`, finite."""
    limits = torch.finfo(dtype)
    steps = torch.arange(group, dtype=torch.float32)
    alternating = torch.where(steps % 2 == 0, 1.0, -1.0)
    groups = [
        torch.zeros(group),
        torch.full((group,), 1.75),
        torch.full((group,), limits.max),
        -torch.full((group,), limits.max),
        alternating * limits.max,
        steps / group * limits.max,
        alternating * limits.smallest_normal,
        alternating * limits.smallest_normal * limits.eps,
        (steps == 3) * limits.max,
        steps - group // 2,
        (steps - group // 2 + 0.5) / 2,  # ties
        steps * 0.125 + 100.0,
        torch.logspace(-7, 4, group),
    ]
    return torch.stack(groups).to(dtype)


DATA: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    "gaussian": lambda group, dtype: gaussian(200, group).to(dtype),
    "heavy-tailed": lambda group, dtype: heavy_tailed(200, group).to(dtype),
    "massive": lambda group, dtype: massive(200, group).to(dtype),
    "tiny": lambda group, dtype: (gaussian(50, group) * 1e-6).to(dtype),
    "odd": odd_groups,
}


def spoilt(group: int, dtype: torch.dtype) -> Tensor:
    """Normal groups, of which 1, 3 and 5 hold a NaN, an infinity and a negative one; `[7, group]`."""
    numbers = gaussian(7, group).to(dtype)
    numbers[1, 2] = torch.nan
    numbers[3, 0] = torch.inf
    numbers[5, -1] = -torch.inf
    return numbers
