"""Strides at random: what `flatten` makes of any view, and that decoding undoes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hilore_plan.codecs.base import compact_strides, decode, encode, flatten
from hilore_plan.codecs.registry import find

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view made by some of: permuting, slicing with steps, expanding, adding dimensions."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    count = int(torch.Size(sizes).numel())
    view = torch.arange(count, dtype=torch.float32).view(sizes)
    for dim, size in enumerate(sizes):
        if size > 1 and draw(st.booleans()):
            start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
            view = view[(slice(None),) * dim + (slice(start, None, step),)]
    if draw(st.booleans()):
        view = view.unsqueeze(draw(st.integers(0, view.dim())))
        view = view.expand([draw(st.integers(1, 3)) if n == 1 else n for n in view.shape])
    return view.permute(draw(st.permutations(range(view.dim()))))


@given(views())
def test_any_view_comes_back_with_its_values(view: Tensor) -> None:
    back = decode(encode(find("cast"), view))
    assert back.shape == view.shape
    assert torch.equal(back, view)


@given(views())
def test_elements_are_coded_once_and_without_a_copy_where_that_is_possible(view: Tensor) -> None:
    flat, layout = flatten(view)
    assert flat.is_contiguous()
    assert flat.dim() == 1
    assert flat.numel() == layout.elements <= view.numel()
    if layout.stride == view.stride() and view.numel():
        assert flat.data_ptr() == view.data_ptr()


@given(views())
def test_compact_strides_are_those_of_empty_like(view: Tensor) -> None:
    if view.numel() and 0 not in view.stride():
        compact = compact_strides(tuple(view.shape), view.stride())
        expected = torch.empty_like(view).stride()
        assert all(a == b for n, a, b in zip(view.shape, compact, expected, strict=True) if n > 1)
