"""Progress on a terminal and in a log file."""

from __future__ import annotations

import pytest

from hilore_plan.cli import ui


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr claims to be a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with ui.progress() as progress:
        assert isinstance(progress, ui.RichProgress)
        progress.start("Profiling", 3)
        progress.advance("layers[0].mlp")
        progress.finish()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Profiling" in captured.err
    assert "3/3" in captured.err


@pytest.mark.usefixtures("terminal")
def test_a_new_task_ends_the_unfinished_one(capsys: pytest.CaptureFixture[str]) -> None:
    with ui.progress() as progress:
        progress.start("First", 3)
        progress.start("Second", 2)
        progress.advance()
        progress.finish()
        progress.finish()
        progress.advance("after the end")
    assert "2/2" in capsys.readouterr().err


@pytest.mark.usefixtures("terminal")
def test_the_bar_goes_when_something_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted()
    assert "\x1b[?25h" in capsys.readouterr().err  # the cursor is back


def _interrupted() -> None:
    with ui.progress() as progress:
        progress.start("Profiling", 3)
        raise KeyboardInterrupt


def test_a_log_file_gets_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ui.progress() as progress:
        progress.start("Profiling", 3)
        progress.advance("layers[0].mlp")
        progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Profiling (3 steps) ..."
    assert lines[1].startswith("Profiling: done in ")
