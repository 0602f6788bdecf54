"""A whole comparison on a tiny model, in real processes; errors that cross from a process to its parent."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from hilore_plan.bench.pairs import paired_ratio, refuse_wrong, run_bench
from hilore_plan.bench.process import ModeProcess
from hilore_plan.errors import ProcessError, RecoveryError, UsageError
from hilore_plan.integrations.profile_source import profile_model
from hilore_plan.planner.plan import solve_plan
from hilore_plan.profiler import profile as profile_file
from hilore_plan.profiler.recompute_scale import NoisyMeasurementWarning
from hilore_plan.schema.io import load_bench, save
from hilore_plan.schema.plan import Plan

SOURCE = "builtin:tiny-qwen2"


@pytest.fixture(scope="module")
def plan() -> Plan:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoisyMeasurementWarning)  # a tiny model's times are noise
        patch.setattr(profile_file, "ROUNDS", 1)
        profile = profile_model(SOURCE, batch=2, prompt_tokens=8, response_tokens=24, dtype="float32", token_points=1)
    return solve_plan(profile, budget="1.1x-gc", token_buckets=1)


def test_a_comparison_from_end_to_end(plan: Plan, tmp_path: Path) -> None:
    bench = run_bench(plan, against=["store"], pairs=1)
    assert [mode.name for mode in bench.modes] == ["plan", "store", "gc"]
    modes = {mode.name: mode for mode in bench.modes}
    assert all(mode.gradient_error == 0.0 for mode in bench.modes)
    assert modes["gc"].throughput_vs_gc == modes["gc"].peak_vs_gc == 1.0
    assert modes["gc"].peak_bytes < modes["plan"].peak_bytes < modes["store"].peak_bytes
    assert modes["plan"].predicted is not None
    assert modes["store"].predicted == plan.entries[-1].store
    # the peak of store-everything was measured twice, in two processes, and is the same to the byte
    assert modes["store"].peak_bytes == plan.entries[-1].store.peak_bytes
    save(bench, tmp_path / "b.json")
    assert load_bench(tmp_path / "b.json") == bench


def test_a_wrong_gradient_shows_no_speed() -> None:
    refuse_wrong("plan", 0.0)
    with pytest.raises(RecoveryError, match="no speed is shown"):
        refuse_wrong("plan", 1e-300)


def test_rounds_in_which_the_machine_is_slow_do_not_change_a_ratio() -> None:
    gc, plan = [10.0, 10.0, 30.0], [8.0, 24.0, 24.0]
    assert paired_ratio(gc, plan) == 1.25
    assert paired_ratio(gc, gc) == 1.0


def test_bad_arguments(plan: Plan) -> None:
    with pytest.raises(UsageError, match="pairs"):
        run_bench(plan, pairs=0)
    with pytest.raises(UsageError, match="unknown mode"):
        run_bench(plan, against=["fast"])


def test_an_error_in_a_process_is_raised_here(plan: Plan) -> None:
    wrong = plan.workload.model_copy(update={"source": "builtin:nothing"})
    with pytest.raises(UsageError, match="nothing"):
        ModeProcess("gc", wrong, "cpu")


def test_a_process_that_is_killed_is_an_error_that_says_so(plan: Plan) -> None:
    with ModeProcess("gc", plan.workload, "cpu") as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(ProcessError, match="the process of mode 'gc' was killed") as caught:
            process.warm()
        assert "memory" in caught.value.hint
