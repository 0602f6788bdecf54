"""What to store, cast or recompute in a GRPO actor update: measured, planned under one memory budget, and applied.

    profile = hilore_plan.profile_model("builtin:qwen2-mini", batch=2, prompt_tokens=256, response_tokens=512)
    plan = hilore_plan.solve_plan(profile, budget="1.1x-gc")
    runtime = hilore_plan.apply(model, plan)

The names below are the public API. Each is imported when first used, so that `import hilore_plan` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hilore_plan.integrations.profile_source import profile_model
    from hilore_plan.planner.plan import solve_plan
    from hilore_plan.runtime.attach import Runtime, apply
    from hilore_plan.schema.io import load_plan, load_profile
    from hilore_plan.tidy.tables import frames

__all__ = ["Runtime", "apply", "frames", "load_plan", "load_profile", "profile_model", "solve_plan"]

_HOMES = {
    "Runtime": "hilore_plan.runtime.attach",
    "apply": "hilore_plan.runtime.attach",
    "frames": "hilore_plan.tidy.tables",
    "load_plan": "hilore_plan.schema.io",
    "load_profile": "hilore_plan.schema.io",
    "profile_model": "hilore_plan.integrations.profile_source",
    "solve_plan": "hilore_plan.planner.plan",
}

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hilore-plan")
    except PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
        return "0+unknown"
