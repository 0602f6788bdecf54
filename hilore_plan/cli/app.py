"""The app: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from hilore_plan.cli import apply, bench, plan, profile, show
from hilore_plan.errors import HiloreError, UsageError

HELP = """Store, cast, compress or recompute: train with the best mix for your model, machine and memory.

\b
  1. hilore profile MODEL -o profiles/x.json     measure what each choice costs here
  2. hilore plan profiles/x.json --budget 1.1x-gc -o plans/x.json
                                                 choose the best mix under a memory budget
  3. hilore apply plans/x.json -- python train.py
                                                 run an unchanged training command under it

MODEL is a hub id, a local folder, builtin:NAME or package.module:factory.
"""

app = typer.Typer(
    name="hilore",
    help=HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it is there at once, and readable without colour
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class StoppedError(HiloreError):
    """Ctrl-C."""

    exit_code = 130


def _version(value: bool) -> None:
    if value:
        import hilore_plan

        typer.echo(f"hilore {hilore_plan.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Typer turns Ctrl-C into a bare exit code; a person should read that nothing was left half-done."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise StoppedError("interrupted; no file was written") from error

    return wrapped


for _command in (profile.profile, plan.plan, apply.apply, show.show, bench.bench):
    app.command()(_interruptible(_command))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code. A fault of ours keeps its traceback."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return get_command(app).main(list(arguments) or ["--help"], prog_name="hilore", standalone_mode=False) or 0
        except HiloreError as error:
            return _report(error)
        except typer.TyperException as error:
            return _report(_usage(error))


def _usage(error: typer.TyperException) -> UsageError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hilore"
    return UsageError(_one_line(error.format_message()), hint=f"{command} --help")


def _one_line(message: str) -> str:
    text = " ".join(message.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _report(error: HiloreError) -> int:
    from hilore_plan.cli import ui

    ui.show_error(error.message, error.hint)
    return error.exit_code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"warning: {message}\n")
