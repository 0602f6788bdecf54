"""The entry of a micro-batch: by tokens, then by exposure, at every edge; and fast."""

from __future__ import annotations

import random
import statistics
from time import perf_counter_ns

import plans
import pytest
from models import MODELS
from runtime.rig import Attach
from torch import nn

from hilore_plan.runtime.lookup import Lookup
from hilore_plan.schema.plan import Entry, Plan

LIMIT_SECONDS = 2e-6
CALLS = 1_000
ROUNDS = 31


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return MODELS["plain"].build()


def plan_with(model: nn.Module, *edges: tuple[int, float | None]) -> Plan:
    """A plan with an entry for each `(tokens_up_to, exposure_up_to)`."""
    entry = plans.make_plan(model).entries[0]
    entries: tuple[Entry, ...] = tuple(
        entry.model_copy(update={"tokens_up_to": tokens, "exposure_up_to": exposure}) for tokens, exposure in edges
    )
    return plans.make_plan(model).model_copy(update={"entries": entries})


@pytest.mark.parametrize(
    ("tokens", "entry"), [(0, 0), (1, 0), (99, 0), (100, 0), (101, 1), (200, 1), (201, 2), (400, 2), (401, None)]
)
def test_tokens_belong_to_the_smallest_bucket_that_holds_them(model: nn.Module, tokens: int, entry: int | None) -> None:
    assert Lookup(plan_with(model, (100, None), (200, None), (400, None))).find(tokens, None) == entry


@pytest.mark.parametrize(
    ("exposure", "entry"),
    [(0.0, 0), (0.5, 0), (0.5000001, 1), (1.0, 1), (1.1, 2), (1e9, 2), (float("inf"), 2), (None, 2)],
)
def test_exposure_belongs_to_the_smallest_bucket_that_holds_it(
    model: nn.Module, exposure: float | None, entry: int
) -> None:
    lookup = Lookup(plan_with(model, (100, 0.5), (100, 1.0), (100, None), (200, 0.5), (200, None)))
    assert lookup.find(100, exposure) == entry
    assert lookup.find(101, exposure) == (3 if entry == 0 else 4)


def test_the_last_bucket_holds_every_exposure_above_it(model: nn.Module) -> None:
    lookup = Lookup(plan_with(model, (100, 0.5), (100, 1.0)))
    assert lookup.find(100, 7.0) == 1
    assert lookup.find(100, None) == 1


def test_an_exposure_that_is_no_number_is_treated_with_most_care(model: nn.Module) -> None:
    lookup = Lookup(plan_with(model, (100, 0.5), (100, 1.0), (100, None)))
    assert lookup.find(100, float("nan")) == 2


def test_entries_may_stand_in_any_order(model: nn.Module) -> None:
    edges = [(tokens, exposure) for tokens in (100, 200, 300) for exposure in (0.5, 1.0, None)]
    mixed = random.Random(0).sample(edges, len(edges))
    lookup, ordered = Lookup(plan_with(model, *mixed)), Lookup(plan_with(model, *edges))
    for tokens in (1, 100, 101, 250, 300, 301):
        for exposure in (None, 0.0, 0.7, 5.0):
            found, expected = lookup.find(tokens, exposure), ordered.find(tokens, exposure)
            assert (None if found is None else mixed[found]) == (None if expected is None else edges[expected])


@pytest.mark.speed
def test_an_entry_is_found_within_two_microseconds(model: nn.Module, attach: Attach) -> None:
    edges = [(1024 * row, exposure) for row in range(1, 17) for exposure in (0.25, 0.5, 1.0, 2.0, None)]
    plan = plan_with(model, *edges)
    lookup = Lookup(plan)
    draw = random.Random(0)
    asked = [(draw.randrange(1, 20_000), draw.choice([None, draw.random() * 3])) for _ in range(CALLS)]

    def find() -> None:
        for tokens, exposure in asked:
            lookup.find(tokens, exposure)

    runtime = attach(model, plan)

    def enter_and_leave() -> None:
        for tokens, exposure in asked:
            with runtime.microbatch(tokens=tokens, exposure=exposure):
                pass

    finding, context = per_call(find), per_call(enter_and_leave)
    shown = f"find {finding * 1e6:.2f} us, microbatch context {context * 1e6:.2f} us a call"
    print(shown)  # noqa: T201
    assert finding <= LIMIT_SECONDS, shown


def per_call(run: object) -> float:
    """Median over rounds of the seconds that one of `CALLS` calls takes."""
    rounds = []
    for _ in range(ROUNDS):
        started = perf_counter_ns()
        run()  # type: ignore[operator]
        rounds.append((perf_counter_ns() - started) / CALLS * 1e-9)
    return statistics.median(rounds)
