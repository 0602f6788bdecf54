"""The risk that a user asks for: `0.015`, `0.3x-noise`, or none at all."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hilore_plan.errors import UsageError
from hilore_plan.planner.buckets import Bucket, check_count, exposure_buckets
from hilore_plan.schema.profile import Profile, Risk

DEFAULT_RISK = "0.015"
_NOISE = "x-noise"
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Wanted:
    """The relative error that a step may have, as asked and as a number, and the calibration that it is judged by."""

    asked: str
    limit: float
    risk: Risk


def check_risk(text: str) -> tuple[float, bool]:
    """The number in a risk, and whether it counts in noise floors.

    Raises:
        UsageError: if it is in neither form, or an error as large as the gradient itself.
    """
    asked = text.strip().lower()
    in_noise = asked.endswith(_NOISE)
    number = asked.removesuffix(_NOISE).strip()
    if _NUMBER.fullmatch(number) is None or not math.isfinite(float(number)):
        raise UsageError(
            f"the risk {text.strip()!r} makes no sense",
            hint="a risk is the relative gradient error of a step, such as 0.015, or 0.3x-noise; 0 compresses nothing",
        )
    if not in_noise and float(number) >= 1:
        raise UsageError(
            f"the risk {text.strip()} allows an error as large as the gradient itself",
            hint="a risk is a part of the gradient: 0.02 is 2 %",
        )
    return float(number), in_noise


def risk_asked(profile: Profile, asked: str | None) -> Wanted | None:
    """The risk to plan with; None if nothing may be compressed.

    Raises:
        UsageError: if the risk makes no sense, or the profile has nothing to judge it by.
    """
    risk = profile.risk
    if asked is None:
        return None if risk is None else Wanted(DEFAULT_RISK, float(DEFAULT_RISK), risk)
    number, in_noise = check_risk(asked)
    if number == 0:
        return None
    if risk is None:
        raise UsageError(
            f"the risk {asked.strip()} needs a calibrated profile, and this one has no codecs",
            hint="profile again with --codecs int8,fp8_e4m3,int4, or plan with --risk 0",
        )
    if not in_noise:
        return Wanted(asked.strip(), number, risk)
    if risk.noise is None:
        raise UsageError(
            f"the risk {asked.strip()} is relative to the noise floor, which this profile does not have",
            hint="give the risk as a number, such as 0.015",
        )
    return Wanted(asked.strip(), number * risk.noise, risk)


def buckets_of(wanted: Wanted | None, count: int) -> tuple[Bucket, ...]:
    """The exposure buckets of a plan: one for all exposures if nothing may be compressed.

    Raises:
        UsageError: if the count makes no sense.
    """
    check_count(count)
    if wanted is None:
        return (Bucket(None),)
    return exposure_buckets(wanted.risk.exposures.values, count, separate_zero=wanted.risk.zero_is_free)
