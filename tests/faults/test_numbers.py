"""Faults 20 to 22 and 25: numbers that a codec or an advantage must not make of others."""

from __future__ import annotations

import math
from collections.abc import Callable

import codec_rows as rows
import pytest
import tolerances
import torch
from torch import Tensor

from hilore_plan.codecs.base import decode, encode
from hilore_plan.codecs.format import Format
from hilore_plan.codecs.grouped import GroupCodec
from hilore_plan.codecs.registry import CODECS, FORMATS, find
from hilore_plan.exposure.exposure import exposure
from hilore_plan.exposure.rollouts import group_advantages

LOSSY = [name for name in CODECS if name != "cast"]
each_codec = pytest.mark.parametrize("name", LOSSY)
GROUP = 128

AWKWARD: dict[str, Callable[[], Tensor]] = {
    "not contiguous": lambda: rows.elements(torch.float32)[:, ::2].transpose(0, 2),
    "expanded": lambda: torch.linspace(-1, 1, 5)[:, None].expand(5, 7),
    "empty": lambda: torch.empty(3, 0, 2),
    "one element": lambda: torch.tensor([[-2.5]]),
    "no dimension": lambda: torch.tensor(3.0),
    "all zero": lambda: torch.zeros(3, 200),
    "constant": lambda: torch.full((3, 200), -0.37),
    "a tiny number among zeros": lambda: torch.eye(1, 300) * 1e-30,
    "the largest there are": lambda: torch.full((300,), torch.finfo(torch.float32).max),
    "an infinity": lambda: torch.cat([torch.ones(GROUP), torch.tensor([math.inf]), torch.ones(GROUP - 1)]),
    "a NaN": lambda: torch.cat([torch.ones(GROUP), torch.tensor([math.nan]), torch.ones(GROUP - 1)]),
}


@each_codec
@pytest.mark.parametrize("kind", AWKWARD)
def test_20_an_awkward_tensor_comes_back_as_near_as_any(name: str, kind: str) -> None:
    """What is finite comes back finite with its zeros; what is not does not come back as a number."""
    tensor = AWKWARD[kind]()
    back = decode(encode(find(name), tensor))
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert not back[~tensor.isfinite()].isfinite().any()
    if tensor.isfinite().all() and tensor.numel():
        assert back.isfinite().all()
        assert not back[tensor == 0].any()
        one = tensor.reshape(1, -1)
        within = tolerances.codec_error(name, one.double(), tensor.dtype)  # one group is no finer than several
        assert ((back.reshape(1, -1).double() - one.double()).abs() <= within).all()


@each_codec
def test_20_offsets_beyond_32_bits(name: str) -> None:
    elements = 2**32 + 3
    encoded = encode(find(name), torch.empty(elements, dtype=torch.bfloat16, device="meta"))
    assert encoded.nbytes == find(name).bytes_for(elements, torch.bfloat16) > 2**31
    assert decode(encoded).shape == (elements,)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_21_zero_groups_and_overflow_come_out_alike_on_every_path(form: Format) -> None:
    """Compiled and as the formulas stand, the same bits: zeros from zeros, the format's end beyond it, NaN from NaN."""
    size = torch.finfo(torch.float32).max
    groups = torch.stack(
        [
            torch.zeros(GROUP),
            torch.linspace(-1000, 1000, GROUP),
            torch.linspace(-1, 1, GROUP) * size,
            torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), torch.ones(GROUP - 3)]),
        ]
    ).view(-1)
    compiled, plain = find(form.name), GroupCodec(form)
    one, other = (
        codec.decode_flat(codec.encode_flat(groups), groups.numel(), groups.dtype) for codec in (compiled, plain)
    )
    # a NaN is a NaN, whatever its bits
    assert torch.equal(*(back.nan_to_num(nan=7.0).view(torch.int32) for back in (one, other)))
    assert torch.equal(one.isnan(), other.isnan())
    zeros, wide, largest, spoilt = one.view(4, GROUP)
    assert not zeros.any()
    assert wide.isfinite().all()
    assert largest.isfinite().all()
    assert not spoilt[:3].isfinite().any()


@each_codec
def test_22_rounding_leans_to_neither_side_and_is_the_same_each_time(name: str) -> None:
    """No codec rounds at random: it draws from no generator, and gives the same bits for the same numbers."""
    numbers = rows.gaussian(400, GROUP)
    before = torch.get_rng_state()
    encoded, again = (encode(find(name), numbers) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, encoded.parts, again.parts))
    error = (decode(encoded) - numbers).double()
    assert abs(error.mean()) <= tolerances.unbiased(error)


@each_codec
def test_22_errors_of_two_tensors_have_nothing_in_common(name: str) -> None:
    one, other = rows.gaussian(400, GROUP), rows.gaussian(800, GROUP)[400:]
    errors = [(decode(encode(find(name), numbers)) - numbers).double().flatten() for numbers in (one, other)]
    correlation = torch.dot(*errors) / (errors[0].norm() * errors[1].norm())
    assert abs(correlation) <= tolerances.uncorrelated(one.numel())


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9, -7.7])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_25_a_group_of_one_reward_has_no_advantage_at_all(reward: float, count: int) -> None:
    """The mean of equal numbers is off by a rounding, which a tiny standard deviation would make a spike of."""
    assert group_advantages([reward] * count, ["g"] * count) == (0.0,) * count
    assert exposure(torch.tensor(group_advantages([reward] * count, ["g"] * count))[:, None], "l2") == 0.0


def test_25_rewards_that_differ_by_a_rounding_make_no_spike() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3]
    assert len(set(rewards)) == 2
    usual = group_advantages([0.0, 1.0, 0.0, 1.0], ["g"] * 4)
    assert max(map(abs, group_advantages(rewards, ["g"] * 4))) < 1e-9 * max(map(abs, usual))
