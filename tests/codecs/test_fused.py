"""Compiled formulas give what the formulas give, bit for bit; without a compiler, one warning and the same result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import codec_rows as rows
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hilore_plan.codecs.format import Format
from hilore_plan.codecs.fused import CodecFallbackWarning, Fused, compiled, scratch
from hilore_plan.codecs.grouped import GroupCodec
from hilore_plan.codecs.int8 import INT8
from hilore_plan.codecs.registry import CODECS, FORMATS, find

LENGTHS = (1, 127, 128, 129, 255, 256, 300, 128 * 3, 64 * 7, 128 * 1000 + 1)
names = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
dtypes = pytest.mark.parametrize("dtype", rows.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@dtypes
@names
def test_every_group_is_coded_as_the_formula_codes_it(form: Format, dtype: torch.dtype) -> None:
    fused, reference = find(form.name), GroupCodec(form)
    for data in rows.DATA.values():
        flat = data(form.group, dtype).view(-1)
        parts, expected = fused.encode_flat(flat), reference.encode_flat(flat)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(parts, expected, strict=True))
        back = fused.decode_flat(parts, flat.numel(), dtype)
        assert torch.equal(bits(back), bits(reference.decode_flat(expected, flat.numel(), dtype)))


@dtypes
@names
def test_groups_that_are_not_finite_decode_alike(form: Format, dtype: torch.dtype) -> None:
    flat = rows.spoilt(form.group, dtype).view(-1)
    results = [c.decode_flat(c.encode_flat(flat), flat.numel(), dtype) for c in (find(form.name), GroupCodec(form))]
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())
    assert torch.equal(results[0].isfinite(), results[1].isfinite())


@names
def test_any_length_is_coded_by_what_was_compiled_once(form: Format) -> None:
    codec, reference = find(form.name), GroupCodec(form)
    assert isinstance(codec, GroupCodec)
    numbers = rows.gaussian(1, max(LENGTHS)).view(-1)
    codec.decode_flat(codec.encode_flat(numbers), len(numbers), numbers.dtype)
    assert codec._fused is not None
    before = dict(codec._fused._kernels)
    for length in LENGTHS:
        flat = numbers[:length]
        parts = codec.encode_flat(flat)
        assert all(map(torch.equal, map(bits, parts), map(bits, reference.encode_flat(flat))))
        assert torch.equal(
            codec.decode_flat(parts, length, flat.dtype), reference.decode_flat(parts, length, flat.dtype)
        )
    assert codec._fused._kernels == before


def test_the_first_call_may_come_from_anywhere() -> None:
    fused = GroupCodec(INT8, Fused(lambda graph, inputs: graph))
    flat = rows.gaussian(3, 128).view(-1)
    with FlopCounterMode(display=False), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        parts = fused.encode_flat(flat)
    assert torch.equal(parts[0], GroupCodec(INT8).encode_flat(flat)[0])


@names
def test_later_calls_may_come_from_below_a_dispatch_mode(form: Format) -> None:
    fused, reference = GroupCodec(form, Fused(lambda graph, inputs: graph)), GroupCodec(form)
    flat = rows.gaussian(3, form.group).view(-1)
    for _ in range(2):
        with FlopCounterMode(display=False):
            parts = fused.encode_flat(flat)
            back = fused.decode_flat(parts, flat.numel(), flat.dtype)
        assert torch.equal(back, reference.decode_flat(parts, flat.numel(), flat.dtype))


def test_the_compiled_function_is_called_directly() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(arguments)
            return graph(*arguments)

        return run

    encode, decode = (compiled(f, scratch(INT8, f, torch.float32), backend) for f in (INT8.encode, INT8.decode))
    calls.clear()
    torch._dynamo.reset()  # what is called directly does not depend on the compiler's own memory
    groups = rows.gaussian(5, 128)
    parts, out = INT8.allocate(groups.numel(), groups.device), torch.empty_like(groups)
    encode(groups, *parts)
    decode(*INT8.runs_of(out), *parts)
    assert len(calls) == 2
    assert all(5 in arguments for arguments in calls)
    assert (out - groups).abs().max() < groups.abs().max() / 127


def test_offsets_have_64_bits() -> None:
    from torch._inductor.utils import run_and_get_cpp_code

    groups = scratch(INT8, INT8.encode, torch.float32)
    _, code = run_and_get_cpp_code(torch.compile(INT8.encode, fullgraph=True, dynamic=True), *groups)
    assert "int64_t x0" in code
    assert "int32_t x0" not in code


def test_without_a_compiler_there_is_one_warning_and_the_same_result() -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    fused = Fused(broken)
    flat = rows.gaussian(6, 128).view(-1)
    with pytest.warns(CodecFallbackWarning, match="no compiler here") as caught:
        results = {form.name: GroupCodec(form, fused).encode_flat(flat) for form in FORMATS}
    assert len(caught) == 1
    for form in FORMATS:
        assert all(map(torch.equal, map(bits, results[form.name]), map(bits, GroupCodec(form).encode_flat(flat))))


def test_no_setting_of_torch_changes() -> None:
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    before = dynamo.save_config(), inductor.save_config()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(INT8.decode, scratch(INT8, INT8.decode, torch.bfloat16))
    assert (dynamo.save_config(), inductor.save_config()) == before


def test_other_devices_and_fake_tensors_run_the_formulas() -> None:
    for codec in CODECS.values():
        if isinstance(codec, GroupCodec):
            parts = codec.encode_flat(torch.empty(1000, device="meta"))
            assert codec.decode_flat(parts, 1000, torch.float32).shape == (1000,)
