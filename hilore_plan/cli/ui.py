"""The terminal: tables to stdout; progress, notes and errors to stderr. Only this module knows rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from hilore_plan.cli.tables import Table, fitted
from hilore_plan.progress import Progress as ProgressProtocol
from hilore_plan.quantities import format_seconds
from hilore_plan.schema.record import Record
from hilore_plan.schema.text import document_text


def show_tables(tables: list[Table]) -> None:
    """Print tables to stdout, as wide as the terminal is."""
    console = Console()
    for table in tables:
        _print_table(console, table)


def render(table: Table, width: int) -> str:
    """The table as plain text of at most `width` columns."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        _print_table(console, table)
    return captured.get()


def show_document(document: Record, tables: list[Table], *, as_json: bool) -> None:
    """Print a document to stdout: as its JSON, or as the tables that were made of it."""
    if as_json:
        sys.stdout.write(document_text(document))
    else:
        show_tables(tables)


def note(message: str) -> None:
    """Tell a person something that no pipe wants."""
    Console(stderr=True).print(Text(message), soft_wrap=True)


def next_command(command: str) -> None:
    """Say what to type next."""
    Console(stderr=True).print(Text.assemble("\nnext: ", (command, "bold")), soft_wrap=True)


def show_error(message: str, hint: str) -> None:
    """One line that says what is wrong, and after a blank line one that says what to do."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("\nhint: ", "bold cyan"), hint), soft_wrap=True)


@contextmanager
def progress() -> Iterator[ProgressProtocol]:
    """Progress on stderr while the block runs: a bar with the time left, or plain lines where no terminal is."""
    if Console(stderr=True).is_terminal:
        with RichProgress() as bar:
            yield bar
    else:
        yield PlainProgress()


class RichProgress:
    """A bar: what is done, how far it is, what comes next, and how long is left."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> RichProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, title: str, total: int) -> None:
        """See `Progress.start`."""
        self._drop()
        self._task = self._bar.add_task(title, total=total, detail="")

    def advance(self, detail: str = "") -> None:
        """See `Progress.advance`."""
        if self._task is not None:
            self._bar.update(self._task, advance=1, detail=detail)

    def finish(self) -> None:
        """See `Progress.finish`."""
        if self._task is not None:
            total = next(task.total for task in self._bar.tasks if task.id == self._task)
            self._bar.update(self._task, completed=total, detail="")
        self._task = None

    def _drop(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)


class PlainProgress:
    """One line when a task begins and one when it is over: fit for a log file."""

    def __init__(self) -> None:
        self._title = ""
        self._began_seconds = 0.0

    def start(self, title: str, total: int) -> None:
        """See `Progress.start`."""
        self._title, self._began_seconds = title, time.monotonic()
        note(f"{title} ({total} steps) ...")

    def advance(self, detail: str = "") -> None:
        """See `Progress.advance`."""

    def finish(self) -> None:
        """See `Progress.finish`."""
        note(f"{self._title}: done in {format_seconds(time.monotonic() - self._began_seconds)}")


def _print_table(console: Console, table: Table) -> None:
    table = fitted(table, console.width)
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, title=None)
    for column in table.columns:
        drawn.add_column(Text(column.title), justify="right" if column.kind == "number" else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    if table.title:
        console.print(Text(table.title, style="bold"), soft_wrap=True)
    if table.rows:
        _print_uncut(console, drawn, table.width)
    for line in table.notes:
        console.print(Text(line), soft_wrap=True)
    console.print()


def _print_uncut(console: Console, drawn: RichTable, width: int) -> None:
    """Print a table over the edge rather than cut it: a number with its end missing is another number."""
    edge = console.width
    console.width = max(edge, width)
    console.print(drawn, crop=False, no_wrap=True)
    console.width = edge
