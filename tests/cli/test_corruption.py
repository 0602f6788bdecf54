"""Spoilt files on the command line: one line of error and exit code 2, or the work that the file asks for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import stand_ins
from command_line import Outcome, Run
from corruption import PLANS, PROFILES, damaged, edited
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = 20.0  # a file that makes a command hang would take for ever; these small ones take a tenth of a second
in_one_terminal = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
PASSED_ON = 7  # what the stand-in for the launcher gives


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> stand_ins.Calls:
    """The calls of the measuring rooms."""
    return stand_ins.install(monkeypatch)


def spoilt(documents: dict[str, object]) -> st.SearchStrategy[bytes]:
    """Documents with a value replaced, or with bytes flipped or missing."""
    replaced = edited(documents).map(lambda edit: edit[0].encode(errors="surrogatepass"))  # type: ignore[arg-type]
    return replaced | damaged(documents)  # type: ignore[arg-type]


def assert_done_or_refused(done: Outcome, success: int = 0) -> None:
    assert "Traceback" not in done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (done.code, len(errors)) in ((success, 0), (2, 1)), done.err
    if errors:
        assert done.out == ""
        assert done.err.splitlines()[-1].startswith("hint: ")


@settings(in_one_terminal, max_examples=80)
@given(content=spoilt({**PLANS, **PROFILES}))
def test_show(content: bytes, hilore: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    codes = []
    for options in ([], ["--json"]):
        done = hilore("show", tmp_path / "a.json", *options)
        assert_done_or_refused(done)
        codes.append(done.code)
    assert codes[0] == codes[1]


@settings(in_one_terminal, max_examples=60)
@given(content=spoilt(PLANS))
def test_apply(content: bytes, hilore: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert_done_or_refused(hilore("apply", tmp_path / "a.json", "--", "true"), success=PASSED_ON)


@settings(in_one_terminal, max_examples=60)
@given(content=spoilt(PROFILES))
def test_plan(content: bytes, hilore: Run, tmp_path: Path) -> None:
    """What comes out of a profile that was accepted can be shown: it is a plan."""
    source, out = tmp_path / "a.json", tmp_path / "out.json"
    source.write_bytes(content)
    began = time.monotonic()
    done = hilore("plan", source, "-b", "1.1x-gc", "-o", out, "--no-verify", "--force")
    assert time.monotonic() - began < SECONDS
    assert_done_or_refused(done)
    if done.code == 0:
        assert hilore("show", out).code == 0
        out.unlink()
    assert not out.exists()
