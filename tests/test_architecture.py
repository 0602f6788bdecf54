"""The shape of the code: who imports whom, how long things are, and words that do not belong in it."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hilore_plan"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py")))

LONGEST_FILE_LINES = 300
LONGEST_BODY_LINES = 45
MEDIAN_BODY_LINES = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {_module(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def _imports(tree: ast.AST, *, lazy: bool = True) -> Iterator[str]:
    """Modules that are imported; a name imported from a package may be a module too. Types-only ones do not count."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.dump(tree.test):
        return
    if isinstance(tree, Function) and not lazy:
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom) and tree.module:
        yield tree.module
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    elif isinstance(tree, ast.Call) and _is_import_by_name(tree):
        yield from (argument.value for argument in tree.args[:1] if isinstance(argument, ast.Constant))
    for child in ast.iter_child_nodes(tree):
        yield from _imports(child, lazy=lazy)


def _is_import_by_name(call: ast.Call) -> bool:
    """`import_module("x")`, and `require("x", purpose)` which says what to install where x is missing."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in {"import_module", "require"}


def _functions() -> list[tuple[str, Function]]:
    return [
        (f"{module}.{node.name}", node)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]


def _body_lines(function: Function) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_rooms_import_in_order() -> None:
    tool = shutil.which("lint-imports", path=f"{Path(sys.executable).parent}") or shutil.which("lint-imports")
    command = [tool] if tool else [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_import_goes_in_a_circle() -> None:
    graph = {module: {name for name in _imports(tree) if name in TREES} for module, tree in TREES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for target in sorted(graph[module] - {module}):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


ONLY = {
    "pulp": r"hilore_plan\.planner\.ilp\w*",
    "highspy": r"hilore_plan\.planner\.ilp\w*",
    "rich": r"hilore_plan\.cli\.ui",
    "typer": r"hilore_plan\.cli\.\w+",
    "matplotlib": r"hilore_plan\.cli\.pictures",
    "pandas": r"hilore_plan\.tidy\.tables",
    "yaml": r"hilore_plan\.cli\.options",
    "triton": r"hilore_plan\.codecs\.\w+_triton",
    "transformers": r"hilore_plan\.integrations\.\w+",
    "trl": r"hilore_plan\.integrations\.\w+",
    "peft": r"hilore_plan\.integrations\.\w+",
    "gguf": r"hilore_plan\.integrations\.\w+",
}


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_known_only_where_it_belongs(library: str) -> None:
    importers = [m for m, tree in TREES.items() if any(name.split(".")[0] == library for name in _imports(tree))]
    assert [module for module in importers if not re.fullmatch(ONLY[library], module)] == []


@pytest.mark.parametrize("library", ["pandas", "transformers", "trl", "peft", "gguf", "matplotlib", "triton"])
def test_optional_and_slow_libraries_are_imported_when_needed(library: str) -> None:
    eager = {m for m, tree in TREES.items() if any(n.split(".")[0] == library for n in _imports(tree, lazy=False))}
    assert {module for module in eager if not module.endswith("_triton")} == set()


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_every_room_says_what_it_is(room: Path) -> None:
    docstring = ast.get_docstring(TREES[_module(room / "__init__.py")])
    assert docstring
    assert len(docstring.splitlines()) >= 3


def test_every_module_says_what_it_is() -> None:
    assert [module for module, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_files_are_short() -> None:
    lengths = {_module(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {module: lines for module, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {name: _body_lines(function) for name, function in _functions()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_BODY_LINES} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_BODY_LINES


def test_no_file_is_for_everything() -> None:
    catch_all = {"utils", "util", "common", "helpers", "misc", "experimental"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem in catch_all] == []


FORBIDDEN = {
    "unfinished work": r"\b(?:TODO|FIXME|XXX|HACK)\b",
    "a path of one machine": r"(?<![\w.~])/(?:home|root|work|Users|mnt)/\w+",
    "a memory unit that is neither decimal nor binary": r"\d\s?(?:Gb|Mb|gb|mb)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_words_that_do_not_belong(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    files = [*FILES, *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_tests_run_against_what_is_installed() -> None:
    spec = importlib.util.find_spec("hilore_plan")
    assert spec is not None
    assert spec.origin is not None
    if Path.cwd() != ROOT:  # as `make test` does: outside the source tree, against the built wheel
        assert not Path(spec.origin).is_relative_to(PACKAGE)
