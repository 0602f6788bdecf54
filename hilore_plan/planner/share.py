r"""One budget of risk, shared by the exposure buckets of one size of micro-batch through one price.

Of bucket e, micro-batches are a part f_e and their squared exposures a part W_e. With plan p_e in bucket e, of T(p)
seconds beyond store-everything and the squared error R(p), a step takes and errs

    sum_e f_e T(p_e)    and    sum_e W_e R(p_e)  <=  limit^2.

At a price lambda of squared error the buckets part: bucket e minimises T + (lambda W_e / f_e) R. So all of them choose
from one curve of plans, T over R, and a plan made for one bucket may serve another. lambda is the least price at which
the choices are within the limit; each round solves at the prices that the buckets have under the lambda of the plans
known so far, until nothing new comes out (the cutting planes of Kelley, "The cutting-plane method for solving convex
programs", 1960). In the end the buckets take, from all plans known, the fastest combination within the limit, which may
use what lambda leaves over. For every lambda, and F(m) = min T + m R,

    sum_e f_e F(lambda W_e / f_e) - lambda limit^2

is a bound on the seconds of every plan (Lagrange).

The promise is per step, and a step may have micro-batches of one size alone. So each size keeps the limit by itself and
has a price of its own: one price for all would leave the sizes where compression saves less with unused risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hilore_plan.planner.buckets import Bucket
from hilore_plan.planner.solve import Planner, Site, Solved
from hilore_plan.planner.timeline import View

ROUNDS = 8
ENOUGH = 3e-4  # of the step time: less than that, in all buckets together, is not looked for any more
STEPS_PER_DECADE = 25  # of prices that are tried while lambda is looked for
SLACK = 1e-9  # relative: a sum of squares may come out that much above the square of the limit
RISE = 0.05  # relative: the risk binds if that much more of it would make a step faster


@dataclass(frozen=True)
class Shared:
    """A plan for each bucket, the price of risk in seconds per squared error, and the squared error of a step.

    `gap` is how much faster any other choice could be, at most, relative to the step time. `tight` says that the limit
    on risk binds: it has a price, and a little more of it (`RISE`) would be enough for a faster choice.
    """

    plans: tuple[Solved, ...]
    price: float
    risk: float
    gap: float
    tight: bool = False


class Curve:
    """The plans of one view under one limit, at as many prices as they were asked for.

    `known` are plans that are known to fit, such as those of a smaller limit.
    """

    def __init__(self, view: View, limit: int, planner: Planner, exact: Solved, known: Sequence[Solved] = ()) -> None:
        self.site, self.exact = Site(view, limit, planner), exact
        self.site.plans.append(list(exact.columns))
        self.plans = _front([exact, *known])
        self._found: dict[tuple[float, bool], Solved] = {}

    @property
    def step_seconds(self) -> float:
        """The time of a step that stores everything."""
        return self.site.view.store.step_seconds

    def at(self, price: float, *, fine: bool = False) -> Solved:
        """The best plan at a price; `fine` takes more time, for a better plan and bound."""
        if (price, fine) not in self._found:
            found = self.site.solve(price, fine=fine) or self.exact
            self._found[price, fine] = found
            self.plans = _front([*self.plans, found])
        return self._found[price, fine]


def find_price(curve: Curve, buckets: Sequence[Bucket], limit: float) -> float:
    """The least price at which the buckets stay within the limit; the curve then has the plans for it."""
    free = curve.at(0.0)
    if curve.exact.simulation.recompute_seconds - free.simulation.recompute_seconds <= ENOUGH * curve.step_seconds:
        return 0.0  # compression has nothing to gain
    price = _least_price(curve.plans, buckets, limit)
    for _ in range(ROUNDS):
        if not price or not _refined(curve, buckets, price):
            break
        price = _least_price(curve.plans, buckets, limit)
    return price


def find_price_and_beyond(curve: Curve, buckets: Sequence[Bucket], limit: float) -> float:
    """The same; the curve then also has the plans for a little more risk, by which `choice` says whether it binds."""
    price = find_price(curve, buckets, limit)
    if price:
        find_price(curve, buckets, limit * (1 + RISE))
    return price


def share(curve: Curve, buckets: Sequence[Bucket], limit: float) -> Shared:
    """The fastest plans for the buckets within the limit on a step's relative error."""
    price = find_price_and_beyond(curve, buckets, limit)
    own = [_price_of(bucket, price) for bucket in buckets]
    least = [curve.at(each, fine=each > 0).bound for each in own]
    found = choice(curve.plans, buckets, limit, price)
    seconds = mean_seconds(buckets, found.plans)
    bound = sum(b.frequency * low for b, low in zip(buckets, least, strict=True)) - price * limit**2
    return replace(found, gap=max(0.0, seconds - bound) / max(curve.step_seconds + seconds, 1e-12))


def choice(known: Sequence[Solved], buckets: Sequence[Bucket], limit: float, price: float) -> Shared:
    """The fastest of the known plans within the limit, and whether the limit is what holds them back."""
    plans = choose_plans(known, buckets, limit)
    more = choose_plans(known, buckets, limit * (1 + RISE))
    risk = sum(bucket.weight * plan.risk for bucket, plan in zip(buckets, plans, strict=True))
    tight = price > 0 and mean_seconds(buckets, more) < mean_seconds(buckets, plans)
    return Shared(plans, price, risk, 0.0, tight)


def mean_seconds(buckets: Sequence[Bucket], plans: Sequence[Solved]) -> float:
    """The seconds of a step beyond store-everything.

    Added up just as `choose_plans` does it, so that no other combination that it knows is faster by a last digit.
    """
    took = 0.0
    for bucket, plan in zip(buckets, plans, strict=True):
        took += bucket.frequency * plan.simulation.recompute_seconds
    return took


def choose_plans(plans: Sequence[Solved], buckets: Sequence[Bucket], limit: float) -> tuple[Solved, ...]:
    """The fastest combination of one plan per bucket within the limit, by way of the fronts of risk and seconds."""
    allowed = limit**2 * (1 + SLACK)
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for bucket in buckets:
        options = sorted(
            (risk + bucket.weight * plan.risk, took + bucket.frequency * plan.simulation.recompute_seconds, (*past, n))
            for risk, took, past in front
            for n, plan in enumerate(plans)
            if risk + bucket.weight * plan.risk <= allowed
        )
        front = []
        for option in options:
            if not front or option[1] < front[-1][1]:
                front.append(option)
    return tuple(plans[number] for number in front[-1][2])


def _price_of(bucket: Bucket, price: float) -> float:
    """What a unit of squared error costs in one bucket."""
    return price * bucket.weight / bucket.frequency if bucket.frequency else 0.0


def _refined(curve: Curve, buckets: Sequence[Bucket], price: float) -> bool:
    """Solve at the prices of the buckets; whether that gained anything to speak of."""
    gained = 0.0
    for bucket in buckets:
        own = _rounded(_price_of(bucket, price))
        before = min(_cost(plan, own) for plan in curve.plans)
        gained += bucket.frequency * (before - _cost(curve.at(own), own))
    return gained > ENOUGH * curve.step_seconds


def _rounded(price: float) -> float:
    """The price on a grid, so that nearly equal ones are solved once."""
    if not price:
        return 0.0
    return float(f"{10 ** (math.floor(math.log10(price) * STEPS_PER_DECADE) / STEPS_PER_DECADE):.6g}")


def _cost(plan: Solved, price: float) -> float:
    return plan.simulation.recompute_seconds + price * plan.risk


def _front(plans: Sequence[Solved]) -> list[Solved]:
    """The plans that no other one beats in both, from the least risk to the least seconds."""
    front: list[Solved] = []
    for plan in sorted(plans, key=lambda plan: (plan.risk, plan.simulation.recompute_seconds)):
        if not front or plan.simulation.recompute_seconds < front[-1].simulation.recompute_seconds:
            front.append(plan)
    return front


def _least_price(plans: Sequence[Solved], buckets: Sequence[Bucket], limit: float) -> float:
    """The least price at which each bucket's best plan, of several the least risky, keeps all within the limit."""
    slopes = _slopes(_front(plans))
    prices = {slope * b.frequency / b.weight for b in buckets if b.weight for slope, _ in slopes}
    for price in (0.0, *sorted(prices)):
        risk = sum(bucket.weight * _risk_at(slopes, plans, _price_of(bucket, price)) for bucket in buckets)
        if risk <= limit**2 * (1 + SLACK):
            return price
    return math.inf  # not reached: at the highest price nothing is compressed


def _risk_at(slopes: Sequence[tuple[float, float]], plans: Sequence[Solved], price: float) -> float:
    """The risk of the best plan at a price; `slopes` ascend in risk and so descend in price."""
    fastest = max(plan.risk for plan in _front(plans))
    return next((risk for slope, risk in slopes if price * (1 + SLACK) >= slope), fastest)


def _slopes(front: Sequence[Solved]) -> list[tuple[float, float]]:
    """For each corner of the convex hull of a front: the price from which on it is the best, and its risk."""
    hull: list[Solved] = []
    for plan in front:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], plan):
            hull.pop()
        hull.append(plan)
    return [(_slope(left, right), left.risk) for left, right in pairwise(hull)]


def _slope(left: Solved, right: Solved) -> float:
    """Seconds saved per squared error more."""
    return (left.simulation.recompute_seconds - right.simulation.recompute_seconds) / (right.risk - left.risk)
