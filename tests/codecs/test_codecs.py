"""Every codec on every layout, dtype and kind of numbers. A codec that joins `CODECS` is tested by that."""

from __future__ import annotations

import codec_rows as rows
import pytest
import tolerances
import torch
from torch import Tensor

from hilore_plan.codecs.base import Codec, decode, encode
from hilore_plan.codecs.grouped import GroupCodec
from hilore_plan.codecs.registry import CODECS, find
from hilore_plan.errors import CodecError

LOSSY = [name for name in CODECS if name != "cast"]
KINDS = [(name, dtype) for name in CODECS for dtype in rows.DTYPES if name != "cast" or dtype is torch.float32]
LOSSY_KINDS = [kind for kind in KINDS if kind[0] != "cast"]


def kinds(argument: object) -> str:
    return str(argument).removeprefix("torch.")


each_kind = pytest.mark.parametrize(("name", "dtype"), KINDS, ids=kinds)
each_lossy_kind = pytest.mark.parametrize(("name", "dtype"), LOSSY_KINDS, ids=kinds)


def group_of(codec: Codec) -> int:
    return codec.format.group if isinstance(codec, GroupCodec) else 128


def round_trip(codec: Codec, tensor: Tensor) -> Tensor:
    """The tensor decoded, of which everything that no codec may change has been checked."""
    encoded = encode(codec, tensor)
    back = decode(encoded)
    assert encoded.codec == codec.name
    assert encoded.nbytes == codec.bytes_for(encoded.layout.elements, tensor.dtype)
    assert (back.shape, back.dtype, back.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert not back.requires_grad
    assert back.numel() == 0 or back.data_ptr() != tensor.data_ptr()
    return back


def once(tensor: Tensor) -> Tensor:
    """The tensor's elements as a codec sees them, in memory order, without a copy where there are no gaps."""
    dims = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    for dim in dims:
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor.permute(dims).reshape(-1)


@each_kind
@pytest.mark.parametrize("layout", rows.DENSE)
def test_a_dense_tensor_comes_back_with_its_strides(name: str, dtype: torch.dtype, layout: str) -> None:
    codec = find(name)
    tensor = rows.DENSE[layout](rows.elements(dtype))
    before = tensor.clone()
    back = round_trip(codec, tensor)
    assert back.stride() == tensor.stride()
    assert torch.equal(tensor, before)
    flat = codec.decode_flat(codec.encode_flat(once(tensor)), once(tensor).numel(), dtype)
    assert torch.equal(once(back), flat)


@each_kind
@pytest.mark.parametrize("layout", rows.GAPS)
def test_a_view_with_gaps_comes_back_without_them(name: str, dtype: torch.dtype, layout: str) -> None:
    codec = find(name)
    tensor = rows.GAPS[layout](rows.elements(dtype))
    back = round_trip(codec, tensor)
    expanded = 0 in tensor.stride()
    assert expanded or back.stride() == torch.empty_like(tensor).stride()
    assert back.stride() == round_trip(codec, back).stride()
    assert torch.allclose(back.float(), tensor.float(), rtol=0, atol=tensor.float().abs().max().item() / 7)


@each_lossy_kind
@pytest.mark.parametrize("data", rows.DATA)
def test_no_error_is_larger_than_the_format_allows(name: str, dtype: torch.dtype, data: str) -> None:
    codec = find(name)
    groups = rows.DATA[data](group_of(codec), dtype)
    back = round_trip(codec, groups)
    allowed = tolerances.codec_error(name, groups.double(), dtype)
    excess = (back.double() - groups.double()).abs() - allowed
    assert back.isfinite().all()
    assert excess.max() <= 0


@each_lossy_kind
def test_zeros_are_exact(name: str, dtype: torch.dtype) -> None:
    numbers = rows.heavy_tailed(50, group_of(find(name))).to(dtype)
    numbers[:, ::3] = 0
    numbers[10:20] = 0
    back = round_trip(find(name), numbers)
    assert back[numbers == 0].abs().max() == 0


@each_lossy_kind
def test_what_is_not_finite_does_not_come_back_finite(name: str, dtype: torch.dtype) -> None:
    codec = find(name)
    spoilt = rows.spoilt(group_of(codec), dtype)
    back = round_trip(codec, spoilt)
    assert not back[~spoilt.isfinite()].isfinite().any()
    whole = [0, 2, 4, 6]
    assert torch.equal(back[whole], round_trip(codec, torch.where(spoilt.isfinite(), spoilt, 0))[whole])


@pytest.mark.parametrize("dtype", rows.DTYPES, ids=kinds)
@pytest.mark.parametrize("name", [name for name in LOSSY if name != "fp8_e4m3_raw"])
def test_a_group_with_a_number_that_is_not_finite_is_nan(name: str, dtype: torch.dtype) -> None:
    back = round_trip(find(name), rows.spoilt(group_of(find(name)), dtype))
    assert back.isnan().all(1).tolist() == [False, True, False, True, False, True, False]


@pytest.mark.parametrize("name", [name for name in CODECS if name != "int8_asym"])
@pytest.mark.parametrize("data", rows.DATA)
def test_what_was_decoded_comes_back_unchanged(name: str, data: str) -> None:
    codec = find(name)
    numbers = rows.DATA[data](group_of(codec), torch.float32)
    once_decoded = round_trip(codec, numbers.bfloat16().float() if name == "cast" else numbers)
    # at the very end of float32 a product is cut, and its group's largest number is another
    usual = once_decoded.abs().amax(1) < 1e38
    assert torch.equal(round_trip(codec, once_decoded)[usual], once_decoded[usual])


@pytest.mark.parametrize(("name", "span", "levels"), [("int8", 0.0, 127), ("int4", 0.0, 7), ("int8_asym", 1.0, 253)])
def test_errors_on_normal_numbers_are_those_of_uniform_rounding(name: str, span: float, levels: int) -> None:
    codec = find(name)
    numbers = rows.gaussian(400, group_of(codec)).clamp_min(0) if span else rows.gaussian(400, group_of(codec))
    _, scales, *_ = codec.encode_flat(numbers.view(-1))
    error = (round_trip(codec, numbers) - numbers)[numbers != 0]
    steps = scales.float()[:, None].expand_as(numbers)[numbers != 0]
    expected = steps.square().mean().item() / 12
    assert error.square().mean().item() == pytest.approx(expected, rel=tolerances.UNIFORM_MEAN_SQUARE)
    assert steps.mean() < 1.01 * numbers.amax() / levels


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64], ids=kinds)
def test_other_dtypes_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    word = str(dtype).removeprefix("torch.")
    with pytest.raises(CodecError, match=rf"codec {name} refuses a {word} tensor of shape \[2, 3\].*float32"):
        encode(find(name), torch.zeros(2, 3, dtype=dtype))


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(CodecError, match="dense memory"):
        encode(find("int8"), torch.eye(3).to_sparse())


def test_cast_refuses_what_it_cannot_give_back() -> None:
    codec = find("cast")
    assert codec.refuses(torch.full((3,), 1 / 3)) == "its values need all of their bits"
    for dtype in (torch.bfloat16, torch.float16):
        special = torch.tensor([1 / 3, -0.0, torch.inf, torch.nan, torch.finfo(dtype).max]).to(dtype).float()
        assert torch.equal(decode(encode(codec, special)).view(torch.int32), special.view(torch.int32))


def test_a_negated_view_is_coded_with_its_sign() -> None:
    imaginary = torch.view_as_complex(rows.elements(torch.float32).view(-1, 2)).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(decode(encode(find("cast"), imaginary)), imaginary)


@pytest.mark.parametrize("name", LOSSY)
def test_sizes_beyond_32_bits(name: str) -> None:
    elements = 2**33 + 5
    encoded = encode(find(name), torch.empty(elements, dtype=torch.bfloat16, device="meta"))
    assert encoded.nbytes == find(name).bytes_for(elements, torch.bfloat16)
    assert decode(encoded).shape == (elements,)


def test_a_parameter_is_coded_outside_of_its_graph() -> None:
    parameter = torch.nn.Parameter(rows.elements(torch.float32))
    encoded = encode(find("int8"), parameter)
    assert not any(part.requires_grad for part in encoded.parts)
