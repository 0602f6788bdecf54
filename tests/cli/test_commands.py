"""What the commands do when all is well: files, tables, JSON, and the next command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import samples
import stand_ins
from command_line import Run

from hilore_plan.profiler import malloc
from hilore_plan.schema import io

pytestmark = pytest.mark.usefixtures("calls")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> stand_ins.Calls:
    """The calls of the measuring rooms."""
    return stand_ins.install(monkeypatch)


def test_profile_writes_its_file_and_says_what_is_next(hilore: Run, tmp_path: Path, calls: stand_ins.Calls) -> None:
    done = hilore(
        "profile", "builtin:x", "-o", tmp_path / "p.json", "--batch", 3, "--head", "full", "--no-accumulation"
    )
    assert done.code == 0
    assert io.load_profile(tmp_path / "p.json") == samples.profile()
    assert "GC peak" in done.out
    assert f"next: hilore plan {tmp_path / 'p.json'} --budget 1.1x-gc" in done.err
    assert calls == [
        {
            "source": "builtin:x",
            "batch": 3,
            "prompt_tokens": 256,
            "response_tokens": 512,
            "dtype": "bfloat16",
            "device": "cpu",
            "attention": "sdpa",
            "lora_rank": 0,
            "head": "full",
            "accumulation": False,
            "token_points": 4,
            "codecs": (),
            "calibration_microbatches": 16,
            "rollouts": None,
        }
    ]


def test_profile_reads_options_from_yaml_and_flags_win(hilore: Run, tmp_path: Path, calls: stand_ins.Calls) -> None:
    (tmp_path / "o.yaml").write_text("batch: 5\nprompt-tokens: 8\nlora_rank: 4\naccumulation: false\n")
    done = hilore("profile", "x", "-o", tmp_path / "p.json", "--config", tmp_path / "o.yaml", "--batch", 6)
    assert done.code == 0, done.err
    assert (calls[0]["batch"], calls[0]["prompt_tokens"], calls[0]["lora_rank"]) == (6, 8, 4)
    assert calls[0]["accumulation"] is False


def test_profile_prints_json_and_nothing_else(hilore: Run, tmp_path: Path) -> None:
    done = hilore("profile", "x", "-o", tmp_path / "p.json", "--json")
    assert json.loads(done.out) == json.loads((tmp_path / "p.json").read_text())


def test_a_measuring_command_starts_anew_with_the_allocators_settings(
    hilore: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):  # noqa: N818 - stands for a process that took our place
        pass

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        assert environment.items() >= malloc.malloc_environment().items()
        raise Started

    for name in malloc.malloc_environment():
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.execve", execve)
    with pytest.raises(Started):
        hilore("profile", "x", "-o", tmp_path / "p.json")


def test_plan_verifies_where_the_device_is(
    hilore: Run, profile_file: Path, tmp_path: Path, calls: stand_ins.Calls
) -> None:
    done = hilore("plan", profile_file, "--budget", "1.1x-gc", "-o", tmp_path / "plan.json")
    assert done.code == 0, done.err
    assert [list(call) for call in calls] == [["verified"]]
    assert "measured" in done.out
    assert f"next: hilore apply {tmp_path / 'plan.json'} -- " in done.err


def test_plan_does_not_verify_when_told(
    hilore: Run, profile_file: Path, tmp_path: Path, calls: stand_ins.Calls
) -> None:
    done = hilore("plan", profile_file, "--budget", "1.1x-gc", "-o", tmp_path / "plan.json", "--no-verify", "--json")
    assert done.code == 0, done.err
    assert calls == []
    assert json.loads(done.out) == json.loads((tmp_path / "plan.json").read_text())


def test_plan_says_that_it_cannot_verify_elsewhere(hilore: Run, tmp_path: Path, calls: stand_ins.Calls) -> None:
    environment = samples.ENVIRONMENT.model_copy(update={"device": "cuda:77"})
    io.save(samples.profile().model_copy(update={"environment": environment}), tmp_path / "p.json")
    done = hilore("plan", tmp_path / "p.json", "--budget", "1.1x-gc", "-o", tmp_path / "plan.json")
    assert done.code == 0, done.err
    assert calls == []
    assert "not verified" in done.err


def test_a_share_of_the_device_is_a_share_of_this_machines_memory(
    hilore: Run, profile_file: Path, tmp_path: Path
) -> None:
    done = hilore("plan", profile_file, "-b", "80%", "-o", tmp_path / "plan.json", "--no-verify")
    assert done.code == 0, done.err
    assert io.load_plan(tmp_path / "plan.json").budget.limit_bytes > 2**30


def test_the_same_plan_twice_is_the_same_file(hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert hilore("plan", profile_file, "-b", "1.05x-gc", "-o", tmp_path / name, "--no-verify").code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_force_overwrites(hilore: Run, profile_file: Path, plan_file: Path) -> None:
    done = hilore("plan", profile_file, "-b", "1.05x-gc", "-o", plan_file, "--no-verify", "--force")
    assert done.code == 0, done.err
    assert io.load_plan(plan_file).budget.asked == "1.05x-gc"


@pytest.mark.parametrize("kind", ["profile", "plan", "bench"])
def test_show_prints_each_kind(kind: str, hilore: Run, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    io.save(getattr(samples, kind)(), path)
    done = hilore("show", path)
    assert done.code == 0
    assert "builtin:example" in done.out
    assert json.loads(hilore("show", path, "--json").out) == json.loads(path.read_text())


def test_show_chooses_the_entry_by_tokens(hilore: Run, plan_file: Path, profile_file: Path) -> None:
    assert "at most 256 tokens" in hilore("show", plan_file, "--tokens", 100).out
    done = hilore("show", plan_file, "--profile", profile_file)
    assert "at most 512 tokens" in done.out
    assert "8.00 MiB" in done.out


@pytest.mark.parametrize("kind", ["profile", "plan", "bench"])
def test_show_draws_each_kind(kind: str, hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    io.save(getattr(samples, kind)(), tmp_path / "file.json")
    done = hilore("show", tmp_path / "file.json", "--plot", tmp_path / "a.png", "--profile", profile_file)
    assert done.code == 0, done.err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_apply_passes_the_command_and_its_exit_code(
    hilore: Run, plan_file: Path, tmp_path: Path, calls: stand_ins.Calls
) -> None:
    done = hilore("apply", plan_file, "--report", tmp_path / "r.json", "--", "python", "train.py", "--steps", "3")
    assert done.code == 7
    command = ["python", "train.py", "--steps", "3"]
    assert calls == [{"command": command, "report_path": tmp_path / "r.json", "check_every": 0, "regroup": []}]


def test_apply_passes_on_how_often_to_check(hilore: Run, plan_file: Path, calls: stand_ins.Calls) -> None:
    assert hilore("apply", plan_file, "--check-every", 20, "--", "python").code == 7
    assert calls[0]["check_every"] == 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--regroup"], ["rows"]),
        (["--leave-out-silent"], ["silent"]),
        (["--leave-out-silent", "--regroup"], ["rows", "silent"]),
    ],
)
def test_apply_passes_on_what_to_do_with_rows(
    hilore: Run, plan_file: Path, calls: stand_ins.Calls, flags: list[str], words: list[str]
) -> None:
    assert hilore("apply", plan_file, *flags, "--", "python").code == 7
    assert calls[0]["regroup"] == words


def test_bench_writes_its_file(hilore: Run, plan_file: Path, tmp_path: Path, calls: stand_ins.Calls) -> None:
    done = hilore("bench", plan_file, "--against", "gc, store", "--pairs", 3, "--json", tmp_path / "b.json")
    assert done.code == 0, done.err
    assert calls == [{"against": ["gc", "store"], "pairs": 3, "profile": None}]
    assert io.load_bench(tmp_path / "b.json") == samples.bench()
    assert "tokens/s" in done.out


def test_bench_takes_plans_made_from_a_profile(
    hilore: Run, plan_file: Path, profile_file: Path, calls: stand_ins.Calls
) -> None:
    done = hilore("bench", plan_file, "--against", "greedy", "--profile", profile_file)
    assert done.code == 0, done.err
    assert calls == [{"against": ["greedy"], "pairs": 7, "profile": io.load_profile(profile_file)}]
    without = hilore("bench", plan_file, "--against", "gc,greedy")
    assert without.code == 2
    assert "--profile FILE" in without.err


def test_progress_is_not_in_what_can_be_piped(hilore: Run, profile_file: Path, tmp_path: Path) -> None:
    done = hilore("plan", profile_file, "-b", "1.1x-gc", "-o", tmp_path / "plan.json")
    assert "Working" in done.err
    assert "Working" not in done.out
