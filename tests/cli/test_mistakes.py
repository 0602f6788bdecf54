"""A user's mistakes: one line that says what is wrong, a hint, exit code 2, no traceback, no file left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
import stand_ins
from command_line import Outcome, Run

from hilore_plan.errors import PlanMismatchError
from hilore_plan.schema import io


def assert_mistake(done: Outcome, *expected: str, code: int = 2) -> None:
    """The outcome is one line of error and one of hint."""
    lines = done.err.strip().splitlines()
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    error = next(line for line in lines if line.startswith("error: "))
    hint = lines[-1]
    assert hint.startswith("hint: "), done.err
    assert lines[lines.index(error) :] == [error, "", hint]
    for text in expected:
        assert text in f"{error}\n{hint}"


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> stand_ins.Calls:
    """The calls of the measuring rooms."""
    return stand_ins.install(monkeypatch)


COMMANDS = {
    "plan": ("plan", "FILE", "-b", "1.1x-gc", "-o", "OUT", "--no-verify"),
    "show": ("show", "FILE"),
    "apply": ("apply", "FILE", "--", "true"),
    "bench": ("bench", "FILE"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "there is no file"),
        ("", "not a valid document"),
        ("{}", "has no schema"),
        ('{"schema": "hilore.plan/9"}', "hilore.plan/9"),
        ('{"schema": "other/1"}', "unknown schema"),
    ],
)
def test_files_that_cannot_be_read(command: str, text: str | None, expected: str, hilore: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    arguments = [{"FILE": path, "OUT": tmp_path / "out.json"}.get(word, word) for word in COMMANDS[command]]
    assert_mistake(hilore(*arguments), expected, str(path))
    assert not (tmp_path / "out.json").exists()


def test_a_profile_where_a_plan_is_needed(hilore: Run, profile_file: Path) -> None:
    assert_mistake(hilore("apply", profile_file, "--", "true"), "is a profile, but a plan is needed", "hilore plan")


def test_a_field_that_nobody_knows(hilore: Run, plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text().replace('"revision": 3', '"revision": 3, "colour": "red"'))
    assert_mistake(hilore("show", plan_file), "at colour: unknown field")


def test_a_newer_revision_is_one_warning(fresh_hilore: Run, plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text().replace('"revision": 3', '"revision": 4, "colour": "red"'))
    done = fresh_hilore("show", plan_file)
    assert done.code == 0
    assert done.err.count("warning: ") == 1
    assert "ignored: colour" in done.err
    assert "warnings.warn" not in done.err


@pytest.mark.parametrize("budget", ["", "lots", "1.1x", "-5GiB", "0x-gc", "nan", "120%", "1e999GiB", "1.1x-cg"])
def test_nonsense_budgets_name_the_forms(budget: str, hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    done = hilore("plan", profile_file, f"--budget={budget}", "-o", tmp_path / "out.json", "--no-verify")
    assert_mistake(done, "budget", "1.1x-gc", "40GiB")
    assert not (tmp_path / "out.json").exists()


def test_a_budget_below_the_least_says_the_least(hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    done = hilore("plan", profile_file, "-b", "100MiB", "-o", tmp_path / "out.json", "--no-verify")
    assert_mistake(done, "100MiB", "MiB", "--budget")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("command", ["profile", "plan", "bench"])
def test_output_that_exists(
    command: str, hilore: Run, profile_file: Path, plan_file: Path, calls: stand_ins.Calls
) -> None:
    before = profile_file.read_bytes()
    arguments = {
        "profile": ("profile", "x", "-o", profile_file),
        "plan": ("plan", profile_file, "-b", "1.1x-gc", "-o", profile_file),
        "bench": ("bench", plan_file, "--json", profile_file),
    }
    assert_mistake(hilore(*arguments[command]), "exists already", "--force")
    assert profile_file.read_bytes() == before
    assert calls == []


@pytest.mark.parametrize("command", ["profile", "plan", "bench", "show"])
def test_output_that_cannot_be_written(
    command: str, hilore: Run, profile_file: Path, plan_file: Path, calls: stand_ins.Calls
) -> None:
    place = profile_file / "below-a-file.json"
    arguments = {
        "profile": ("profile", "x", "-o", place),
        "plan": ("plan", profile_file, "-b", "1.1x-gc", "-o", place),
        "bench": ("bench", plan_file, "--json", place),
        "show": ("show", plan_file, "--plot", place),
    }
    assert_mistake(hilore(*arguments[command]), "cannot write", str(place))
    assert calls == []


@pytest.mark.parametrize("device", ["cuda:77", "tpu", "cpu:1", ""])
def test_a_device_that_is_not_there(device: str, hilore: Run, tmp_path: Path, calls: stand_ins.Calls) -> None:
    assert_mistake(hilore("profile", "x", "-o", tmp_path / "p.json", "--device", device), "device", repr(device))
    assert list(tmp_path.iterdir()) == []
    assert calls == []


def test_verifying_without_the_device(hilore: Run, tmp_path: Path) -> None:
    environment = samples.ENVIRONMENT.model_copy(update={"device": "cuda:77"})
    io.save(samples.profile().model_copy(update={"environment": environment}), tmp_path / "p.json")
    io.save(samples.plan().model_copy(update={"environment": environment}), tmp_path / "plan.json")
    done = hilore("plan", tmp_path / "p.json", "-b", "1.1x-gc", "-o", tmp_path / "out.json", "--verify")
    assert_mistake(done, "cuda:77", "--no-verify")
    assert_mistake(hilore("bench", tmp_path / "plan.json"), "cuda:77")
    assert not (tmp_path / "out.json").exists()


def test_a_plan_for_another_model(hilore: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(
        monkeypatch,
        PlanMismatchError("the plan is for 3 blocks of ExampleBlock, the model has 4", hint="profile this model"),
    )
    assert_mistake(hilore("bench", plan_file), "the plan is for 3 blocks", "profile this model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batchsize: 4", "'batchsize'"),
        ("batch: four", "option batch"),
        ("batch: 0", "option batch"),
        ("head: half", "option head"),
        ("accumulation: 1", "option accumulation"),
        ("- batch", "does not hold options"),
        ("batch: [", "not valid YAML (line 1)"),
        ("batch: !!python/object:os.system {}", "not valid YAML"),
        (None, "cannot read"),
    ],
)
def test_config_files(text: str | None, expected: str, hilore: Run, tmp_path: Path, calls: stand_ins.Calls) -> None:
    if text is not None:
        (tmp_path / "o.yaml").write_text(text)
    done = hilore("profile", "x", "-o", tmp_path / "p.json", "--config", tmp_path / "o.yaml")
    assert_mistake(done, expected, "o.yaml")
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nothing",), "no such command"),
        (("show",), "missing argument"),
        (("show", "PLAN", "--colour"), "no such option"),
        (("show", "PLAN", "--tokens", "none"), "tokens"),
        (("show", "PLAN", "--tokens", "100000"), "no entry for 100000 tokens"),
        (("profile", "x"), "missing option"),
        (("profile", "x", "-o", "OUT", "--batch", "0"), "batch"),
        (("profile", "x", "-o", "OUT", "--head", "half"), "head"),
        (("plan", "PROFILE", "-b", "1x-gc", "-o", "OUT", "--solver", "abacus"), "solver"),
        (("plan", "PROFILE", "-b", "1x-gc", "-o", "OUT", "--token-buckets", "0"), "token-buckets"),
        (("bench", "PLAN", "--against", "magic"), "'magic'"),
        (("bench", "PLAN", "--against", ","), "no mode"),
        (("apply", "PLAN"), "no command was given"),
        (("apply", "PLAN", "--"), "no command was given"),
        (("apply", "PLAN", "python", "train.py", "--lr", "1"), "--lr"),
    ],
)
def test_command_lines(
    arguments: tuple[str, ...], expected: str, hilore: Run, plan_file: Path, profile_file: Path
) -> None:
    places = {"PLAN": plan_file, "PROFILE": profile_file, "OUT": plan_file.parent / "out.json"}
    assert_mistake(hilore(*(places.get(word, word) for word in arguments)), expected)


def test_pictures_without_matplotlib(hilore: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_mistake(hilore("show", plan_file, "--plot", plan_file.parent / "a.png"), "matplotlib", "notebooks")


def test_pictures_of_no_kind(hilore: Run, plan_file: Path) -> None:
    pytest.importorskip("matplotlib")
    assert_mistake(hilore("show", plan_file, "--plot", plan_file.parent / "a.nothing"), "cannot draw", ".png")


@pytest.mark.parametrize("command", ["profile", "plan", "bench"])
def test_ctrl_c_leaves_nothing(
    command: str, hilore: Run, profile_file: Path, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.install(monkeypatch, KeyboardInterrupt())
    before = sorted(tmp_path.iterdir())
    arguments = {
        "profile": ("profile", "x", "-o", tmp_path / "out.json"),
        "plan": ("plan", profile_file, "-b", "1.1x-gc", "-o", tmp_path / "out.json"),
        "bench": ("bench", plan_file, "--json", tmp_path / "out.json"),
    }
    done = hilore(*arguments[command])
    assert done.code == 130
    assert "interrupted" in done.err
    assert "Traceback" not in done.err
    assert sorted(tmp_path.iterdir()) == before


def test_ctrl_c_at_a_real_process(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time, types\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "fake = types.ModuleType('hilore_plan.integrations.profile_source')\n"
        "def profile_model(source, *, progress, **options):\n"
        "    progress.start('Measuring', 9)\n"
        "    time.sleep(60)\n"
        "fake.profile_model = profile_model\n"
        "sys.modules[fake.__name__] = fake\n"
        "from hilore_plan.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "profile", "x", "-o", str(tmp_path / "p.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Measuring" in process.stderr.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted; no file was written" in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_ours_keeps_its_traceback(hilore: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        hilore("bench", plan_file)
