"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hilore_plan

NAMES = ["Runtime", "apply", "frames", "load_plan", "load_profile", "profile_model", "solve_plan"]


def test_the_public_names_are_these() -> None:
    assert hilore_plan.__all__ == NAMES
    assert set(NAMES) <= set(dir(hilore_plan))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_documented(name: str) -> None:
    found = getattr(hilore_plan, name)
    assert callable(found)
    assert found.__doc__
    assert found.__name__ == name


def test_other_names_are_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hilore_plan.nonsense


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert hilore_plan.__version__ == version("hilore-plan")


def _loaded_after(statement: str, *modules: str) -> list[str]:
    program = f"import sys\n{statement}\nprint(*(name for name in {modules!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = (
        "torch",
        "transformers",
        "trl",
        "peft",
        "pulp",
        "pandas",
        "triton",
        "pydantic",
        "rich",
        "typer",
        "matplotlib",
    )
    assert _loaded_after("import hilore_plan", *heavy) == []


def test_applying_a_plan_loads_no_training_library() -> None:
    heavy = ("transformers", "trl", "peft", "pulp", "pandas", "typer", "matplotlib")
    assert _loaded_after("import hilore_plan; hilore_plan.apply; hilore_plan.load_plan", *heavy) == []


def test_solving_loads_no_torch() -> None:
    assert (
        _loaded_after("import hilore_plan; hilore_plan.solve_plan; hilore_plan.load_profile", "torch", "pandas") == []
    )


def test_tables_load_pandas_only_when_one_is_asked_for() -> None:
    assert _loaded_after("import hilore_plan; hilore_plan.frames", "torch", "pandas", "matplotlib") == []
