"""Stand-ins for the rooms that measure, so that the command line is tested without them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import samples

from hilore_plan.progress import Progress
from hilore_plan.schema.bench import Bench
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Profile


class Calls(list[dict[str, Any]]):
    """The arguments with which a stand-in was called."""


def _module(name: str, **members: Callable[..., Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def install(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> Calls:
    """Put stand-ins where the real modules would be imported from. With `error`, each raises it half-way."""
    calls = Calls()

    def profile_model(source: str, *, progress: Progress, **options: object) -> Profile:
        calls.append({"source": source, **options})
        _work(progress, error)
        return samples.profile()

    def verify_plan(plan: Plan, profile: Profile, *, progress: Progress) -> Plan:
        calls.append({"verified": plan})
        _work(progress, error)
        return samples.plan()

    def run_bench(plan: Plan, *, against: list[str], pairs: int, profile: object, progress: Progress) -> Bench:
        calls.append({"against": against, "pairs": pairs, "profile": profile})
        _work(progress, error)
        return samples.bench()

    def launch(plan_path: object, command: list[str], **options: object) -> int:
        calls.append({"command": command, **options})
        return 7

    for name, function in (
        ("hilore_plan.integrations.profile_source", profile_model),
        ("hilore_plan.bench.verify", verify_plan),
        ("hilore_plan.bench.pairs", run_bench),
        ("hilore_plan.integrations.launcher", launch),
    ):
        monkeypatch.setitem(sys.modules, name, _module(name, **{function.__name__: function}))
    return calls


def _work(progress: Progress, error: BaseException | None) -> None:
    progress.start("Working", 2)
    progress.advance("half-way")
    if error is not None:
        raise error
    progress.finish()
