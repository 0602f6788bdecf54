"""The committed examples: their profiles and plans load, fit each other, and say what the simulator says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilore_plan.bench.verify import corrections
from hilore_plan.planner.simulate import Simulation, simulate
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.io import load_plan, load_profile
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import Profile

ROOT = Path(__file__).parents[1]
NAMES = ["qwen2-mini", "smollm2-135m"]


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest) -> tuple[Profile, Plan]:
    file = f"{request.param}.json"
    return load_profile(ROOT / "profiles" / file), load_plan(ROOT / "plans" / file)


def simulated(profile: Profile, entry: Entry) -> Simulation:
    view = view_at(profile, entry.tokens_up_to)
    actions = {block: group.actions for group in entry.groups for block in group.blocks}
    return simulate(view, [actions[block] for block in view.blocks])


def test_the_plan_is_of_the_profile(example: tuple[Profile, Plan]) -> None:
    profile, plan = example
    for field in ("model", "workload", "environment", "block_names"):
        assert getattr(plan, field) == getattr(profile, field), field


def test_fingerprints_match(example: tuple[Profile, Plan]) -> None:
    profile, plan = example
    assert len(plan.classes) == len(profile.classes)
    for found, cls in zip(plan.classes, profile.classes, strict=True):
        assert found.name == cls.name
        assert found.graph_hash == cls.graph_hash
        assert found.blocks == cls.blocks
        assert found.parameters == cls.parameters


def test_names_are_units_of_the_profile(example: tuple[Profile, Plan]) -> None:
    profile, plan = example
    units = {cls.name: {value.name for value in cls.values if value.keepable} for cls in profile.classes}
    for entry in plan.entries:
        for group in entry.groups:
            assert set(group.actions) == units[group.class_name]


def test_the_largest_entry_is_for_the_largest_point(example: tuple[Profile, Plan]) -> None:
    profile, plan = example
    largest = profile.points[-1]
    assert plan.entries[-1].tokens_up_to == largest.tokens == profile.workload.tokens
    assert (plan.entries[-1].store, plan.entries[-1].gc) == (largest.store, largest.gc)


def test_the_simulator_predicts_the_same_peak(example: tuple[Profile, Plan]) -> None:
    """To the byte. A verified plan may have learned one correction, which all its entries share by a fixed rule."""
    profile, plan = example
    last = plan.entries[-1]
    learned = 0 if last.measured is None else last.predicted.peak_bytes - simulated(profile, last).peak_bytes
    extra = corrections([entry.tokens_up_to for entry in plan.entries], learned)
    for entry in plan.entries:
        simulation = simulated(profile, entry)
        assert entry.predicted.peak_bytes == simulation.peak_bytes + extra[entry.tokens_up_to]
        assert entry.predicted.binding == simulation.binding


def test_peaks_are_within_the_budget(example: tuple[Profile, Plan]) -> None:
    _, plan = example
    for entry in plan.entries:
        assert entry.predicted.peak_bytes <= plan.budget.limit_bytes
        if entry.measured is not None:
            assert entry.measured.peak_bytes <= plan.budget.limit_bytes
