"""`hilore plan` with a risk, and its sweep."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path

import pytest
import samples
import stand_ins
from calibrated import calibrated
from command_line import Run
from strategies import llama_profile

from hilore_plan.errors import FileError
from hilore_plan.schema import io
from hilore_plan.schema.plan import codec_of


@pytest.fixture(scope="module")
def calibrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated profile on disk, with room to win something."""
    path = tmp_path_factory.mktemp("profiles") / "calibrated.json"
    io.save(calibrated(llama_profile(blocks=8, lengths=(256,))), path)
    return path


def _plan(hilore: Run, profile: Path, output: Path, *options: object) -> str:
    done = hilore("plan", profile, "-b", "1.0x-gc", "-o", output, "--no-verify", "--token-buckets", 1, *options)
    assert done.code == 0, done.err
    return done.out


def test_a_plan_has_entries_by_exposure_and_says_what_binds(hilore: Run, calibrated_file: Path, tmp_path: Path) -> None:
    out = _plan(hilore, calibrated_file, tmp_path / "p.json", "--risk", "0.01", "--exposure-buckets", 3)
    plan = io.load_plan(tmp_path / "p.json")
    assert plan.risk is not None
    assert (plan.risk.asked, len(plan.entries)) == ("0.01", 3)
    assert "price of risk" in out
    assert f"is expected to be {plan.risk.expected:.4f}" in out
    assert "risk keeps the step from being faster" in out
    done = hilore("show", tmp_path / "p.json", "--profile", calibrated_file, "--exposure", 0)
    assert done.code == 0, done.err
    assert "compress:int" in done.out
    assert "exposure 0" in done.out


def test_risk_zero_compresses_nothing(hilore: Run, calibrated_file: Path, tmp_path: Path) -> None:
    out = _plan(hilore, calibrated_file, tmp_path / "p.json", "--risk", "0")
    plan = io.load_plan(tmp_path / "p.json")
    assert plan.risk is None
    assert all(
        codec_of(action) is None for entry in plan.entries for g in entry.groups for action in g.actions.values()
    )
    assert "risk" not in out


def test_show_prints_what_codecs_cost(hilore: Run, calibrated_file: Path) -> None:
    done = hilore("show", calibrated_file)
    assert done.code == 0, done.err
    assert "codecs, per block" in done.out
    assert "fp8_e4m3" in done.out
    assert "noise floor 0.0540" in done.out


def _sweep(hilore: Run, profile: Path, *options: object) -> tuple[str, str]:
    done = hilore("plan", profile, "--sweep-budget", "0.5,1.0,9x-store", "--sweep-risk", "0,0.01", *options)
    assert done.code == 0, done.err
    return done.out, done.err


def test_a_sweep_prints_the_frontier(hilore: Run, calibrated_file: Path) -> None:
    out, err = _sweep(hilore, calibrated_file)
    assert [out.count(word) for word in ("infeasible", "0.5x-gc", "1.0x-gc", "neither")] == [2, 2, 2, 2]
    assert "next: hilore plan" in err


def test_a_sweep_writes_csv(hilore: Run, calibrated_file: Path, tmp_path: Path) -> None:
    out, _ = _sweep(hilore, calibrated_file, "--csv", "-")
    found = list(csv.DictReader(StringIO(out)))
    assert [(row["budget"], row["risk"]) for row in found][:3] == [
        ("0.5x-gc", "0"),
        ("0.5x-gc", "0.01"),
        ("1.0x-gc", "0"),
    ]
    assert (found[0]["binding"], found[0]["step_seconds"]) == ("infeasible", "")
    assert float(found[3]["step_seconds"]) < float(found[2]["step_seconds"])
    assert 0 < float(found[3]["expected_error"]) <= 0.01
    _, err = _sweep(hilore, calibrated_file, "--csv", tmp_path / "f.csv")
    assert (tmp_path / "f.csv").read_text() == out
    assert f"wrote {tmp_path / 'f.csv'}" in err
    again = hilore("plan", calibrated_file, "--sweep-risk", "0", "-b", "9x-store", "--csv", tmp_path / "f.csv")
    assert again.code == FileError.exit_code
    assert "exists already" in again.err


def test_a_sweep_prints_json(hilore: Run, calibrated_file: Path) -> None:
    out, _ = _sweep(hilore, calibrated_file, "--json")
    document = json.loads(out)
    assert len(document["points"]) == 6
    assert document["points"][0]["binding"] == "infeasible"
    assert document["points"][3]["risk"] == "0.01"


def test_a_sweep_over_one_option_takes_the_other_as_given(hilore: Run, calibrated_file: Path) -> None:
    done = hilore("plan", calibrated_file, "--sweep-risk", "0,0.9", "--budget", "2x-store", "--csv", "-")
    assert [row["budget"] for row in csv.DictReader(StringIO(done.out))] == ["2x-store"] * 2
    done = hilore("plan", calibrated_file, "--sweep-budget", "9x-store", "--risk", "0", "--csv", "-")
    assert [row["risk"] for row in csv.DictReader(StringIO(done.out))] == ["0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-b", "1x-gc", "-o", "OUT", "--risk", "much"), ("risk 'much'", "0.3x-noise")),
        (("-b", "1x-gc", "-o", "OUT", "--risk", "0.01"), ("needs a calibrated profile", "--codecs")),
        (("-b", "1x-gc", "-o", "OUT", "--exposure-buckets", "0"), ("exposure-buckets",)),
        (("-b", "1x-gc", "-o", "OUT", "--csv", "x.csv"), ("--csv is for what is swept", "--sweep-budget")),
        (("-o", "OUT"), ("missing option '--budget'",)),
        (("-b", "1x-gc"), ("missing option '--output'",)),
        (("--sweep-risk", "0,lots"), ("risk 'lots'",)),
        (("--sweep-risk", ","), ("no risk to sweep",)),
        (("--sweep-budget", "1.0,-3"), ("budget", "1.1x-gc")),
        (("--sweep-risk", "0.01", "--sweep-budget", "1.1"), ("needs a calibrated profile",)),
    ],
)
def test_mistakes(
    options: tuple[str, ...],
    words: tuple[str, ...],
    hilore: Run,
    profile_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_ins.install(monkeypatch)
    named = [str(tmp_path / "out.json") if option == "OUT" else option for option in options]
    done = hilore("plan", profile_file, *named)
    assert done.code == 2
    assert all(word in done.err for word in words), done.err
    assert "hint: " in done.err
    assert not (tmp_path / "out.json").exists()


def test_a_plan_without_a_calibration_says_nothing_of_risk(hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    done = hilore("plan", profile_file, "-b", "1.1x-gc", "-o", tmp_path / "p.json", "--no-verify")
    assert "risk" not in done.out
    assert io.load_plan(tmp_path / "p.json").risk is None
    assert samples.profile().risk is None
