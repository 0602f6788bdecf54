"""The status line of what runs inside a training script."""

from __future__ import annotations

import io
import time

import pytest
from plans import make_plan
from runtime.rig import PLAIN, warm_up

from hilore_plan.progress import StatusLine
from hilore_plan.runtime.attach import apply
from hilore_plan.runtime.variants import Variants


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Told:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.finished = 0

    def start(self, title: str, total: int) -> None:
        self.titles.append(title)

    def advance(self, detail: str = "") -> None:
        raise AssertionError("a capture is one step")

    def finish(self) -> None:
        self.finished += 1


def until_shown(stream: io.StringIO) -> None:
    for _ in range(2000):
        if stream.getvalue():
            return
        time.sleep(0.005)
    raise AssertionError("nothing was written in ten seconds")


def test_a_long_task_gets_one_line_and_its_seconds() -> None:
    stream = Terminal()
    line = StatusLine(stream, patience_seconds=0.0)
    line.start("capturing a block", 1)
    until_shown(stream)
    assert stream.getvalue() == "capturing a block ..."
    line.finish()
    line.finish()
    shown, _, rest = stream.getvalue().partition("\r")
    assert shown == "capturing a block ..."
    assert rest.startswith("capturing a block: done in ")
    assert rest.endswith(" s\n")
    assert len(stream.getvalue().splitlines()) == 2  # "\r" begins one for Python, not for a terminal


def test_a_quick_task_gets_none() -> None:
    stream = Terminal()
    line = StatusLine(stream, patience_seconds=30.0)
    line.start("quickly", 1)
    line.finish()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("stream", "rank"), [(io.StringIO(), "0"), (Terminal(), "1")], ids=["a file", "rank 1"])
def test_a_file_and_other_ranks_get_none(stream: io.StringIO, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    line = StatusLine(stream, patience_seconds=0.0)
    line.start("capturing a block", 1)
    time.sleep(0.05)
    line.finish()
    assert stream.getvalue() == ""


def test_every_capture_is_told_and_nothing_else() -> None:
    model = PLAIN.build()
    told = Told()
    with apply(model, make_plan(model)) as runtime:
        runtime.variants = Variants(told)
        warm_up(PLAIN, model)
        warm_up(PLAIN, model)
    assert told.titles == ["hilore: capturing the graph of Plain"]
    assert told.finished == 1
