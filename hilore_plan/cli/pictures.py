"""Pictures of documents, for `hilore show --plot` and for notebooks. Each draws into matplotlib axes that it is given.

figure, axes = plt.subplots()
peak_timeline(axes, plan, profile)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilore_plan.errors import FileError, UsageError
from hilore_plan.planner.simulate import PointBytes, timeline
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.bench import Bench
from hilore_plan.schema.plan import Action, Entry, Plan
from hilore_plan.schema.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hilore_plan.schema.io import Document

GIB = 2**30
COLOURS: dict[Action, str] = {"store": "#1b6ca8", "cast": "#7cc4e8", "recompute": "#f2e6d0"}
PARTS = {"fixed": "#9a9a9a", "gradients": "#c9b458", "kept": "#1b6ca8", "rebuilt": "#e08e45", "working": "#b6465f"}


def draw(document: Document, path: Path, *, profile: Profile | None = None) -> None:
    """Draw a document into a picture file, whose ending chooses the format.

    Args:
        document: a profile, plan or bench.
        path: where the picture goes.
        profile: the plan's profile; with it, a plan's picture shows the peak timeline as well.

    Raises:
        UsageError: if matplotlib is not installed.
        FileError: if the picture cannot be written.
    """
    figure_class = _matplotlib()
    if isinstance(document, Plan):
        figure = _plan_figure(figure_class, document, profile)
    elif isinstance(document, Bench):
        figure = figure_class(figsize=(12, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        frontier(left, document)
        predicted_and_measured(right, document)
    else:
        figure = figure_class(figsize=(9, 6), layout="constrained")
        unit_costs(figure.subplots(), document)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot draw {path}: {error}", hint="choose a name that ends in .png, .svg or .pdf") from error


def action_map(axes: Axes, plan: Plan, entry: Entry) -> None:
    """The action of every unit (rows) in every block (columns) of an entry."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    actions = list(COLOURS)
    units = list(dict.fromkeys(unit for group in entry.groups for unit in group.actions))
    cells = [[float("nan")] * len(plan.block_names) for _ in units]
    for group in entry.groups:
        for block in group.blocks:
            for unit, action in group.actions.items():
                cells[units.index(unit)][block] = actions.index(action)
    axes.imshow(cells, aspect="auto", cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=len(actions) - 1)
    axes.set_yticks(range(len(units)), units, fontsize=6)
    axes.set_xlabel("block")
    axes.set_title(f"up to {entry.tokens_up_to} tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    keys = [Patch(color=COLOURS[action], label=action) for action in actions]
    axes.legend(handles=keys, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(actions))


def peak_timeline(axes: Axes, plan: Plan, profile: Profile, entry: Entry | None = None) -> None:
    """Bytes at every point of a step, by what holds them, against the budget."""
    entry = entry or plan.entries[-1]
    points = timeline(view_at(profile, entry.tokens_up_to), _actions(entry))
    layers = [[_part(point, part) / GIB for point in points] for part in PARTS]
    axes.stackplot(range(len(points)), layers, labels=list(PARTS), colors=list(PARTS.values()))
    axes.axhline(plan.budget.limit_bytes / GIB, color="black", linestyle="--", label=f"budget {plan.budget.asked}")
    marks = _landmarks([point.name for point in points])
    axes.set_xticks(marks, [points[number].name for number in marks], rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("GiB")
    axes.set_title(f"peak timeline at {entry.tokens_up_to} tokens")
    axes.legend(fontsize=7, loc="lower center", ncols=3)


def predicted_and_measured(axes: Axes, document: Plan | Bench) -> None:
    """Predicted peaks beside measured ones."""
    pairs = _peaks(document)
    positions = range(len(pairs))
    axes.bar([p - 0.2 for p in positions], [predicted / GIB for _, predicted, _ in pairs], 0.4, label="predicted")
    axes.bar([p + 0.2 for p in positions], [measured / GIB for _, _, measured in pairs], 0.4, label="measured")
    axes.set_xticks(list(positions), [name for name, _, _ in pairs], fontsize=8)
    axes.set_ylabel("peak, GiB")
    axes.set_title("predicted and measured" if pairs else "nothing was measured")
    axes.legend(fontsize=7, loc="lower center")


def frontier(axes: Axes, bench: Bench) -> None:
    """Speed over peak memory, both relative to gradient checkpointing: up and left is better."""
    for mode in bench.modes:
        axes.scatter(mode.peak_vs_gc, mode.throughput_vs_gc, marker="*" if mode.name == "plan" else "o", s=80)
        axes.annotate(mode.name, (mode.peak_vs_gc, mode.throughput_vs_gc), xytext=(5, 5), textcoords="offset points")
    axes.set_xlabel("peak memory, x GC")
    axes.set_ylabel("throughput, x GC")
    axes.set_title("what memory buys")
    axes.grid(visible=True, alpha=0.3)
    axes.margins(0.15)


def unit_costs(axes: Axes, profile: Profile) -> None:
    """Each unit of each class by the bytes that storing it takes and the seconds that its op takes again."""
    view = view_at(profile, profile.points[-1].tokens)
    for block_class in view.classes:
        makers = [(unit, block_class.makers[unit]) for unit in block_class.units]
        made = [(unit, maker) for unit, maker in makers if maker is not None]
        mebibytes = [block_class.value_bytes[unit] / 2**20 for unit, _ in made]
        milliseconds = [block_class.ops[maker].seconds * 1e3 for _, maker in made]
        axes.scatter(mebibytes, milliseconds, label=block_class.name)
        for (unit, _), x, y in zip(made, mebibytes, milliseconds, strict=True):
            axes.annotate(block_class.names[unit], (x, y), fontsize=6, xytext=(3, 2), textcoords="offset points")
    axes.set_xlabel("MiB to store, per block")
    axes.set_ylabel("ms of its op")
    axes.set_title(f"recovery units at {view.tokens} tokens")
    axes.legend(fontsize=7)


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("pictures need matplotlib", hint="pip install 'hilore-plan[notebooks]'") from error
    return Figure


def _plan_figure(figure_class: Any, plan: Plan, profile: Profile | None) -> Any:
    columns = len(plan.entries)
    figure = figure_class(figsize=(max(12, 4 * columns), 11), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3, 2))
    for axes, entry in zip(upper.subplots(1, columns, squeeze=False)[0], plan.entries, strict=True):
        action_map(axes, plan, entry)
    if profile is None:
        predicted_and_measured(lower.subplots(), plan)
    else:
        left, right = lower.subplots(1, 2, width_ratios=(3, 1))
        peak_timeline(left, plan, profile)
        predicted_and_measured(right, plan)
    return figure


def _actions(entry: Entry) -> list[dict[str, Action]]:
    chosen = {block: group.actions for group in entry.groups for block in group.blocks}
    return [chosen[block] for block in sorted(chosen)]


def _part(point: PointBytes, part: str) -> int:
    return int(getattr(point, part))


def _landmarks(names: list[str]) -> list[int]:
    """The points to write on the axis: about ten, and in any case the turn from forward to backward and the end."""
    every = max(1, len(names) // 10)
    turn = names.index("head")
    return sorted({turn, len(names) - 1, *(n for n in range(0, len(names) - every, every) if abs(n - turn) >= every)})


def _peaks(document: Plan | Bench) -> list[tuple[str, int, int]]:
    if isinstance(document, Plan):
        entries = ((f"{e.tokens_up_to} tokens", e.predicted, e.measured) for e in document.entries)
        return [(name, p.peak_bytes, m.peak_bytes) for name, p, m in entries if m is not None]
    modes = ((mode.name, mode.predicted, mode.peak_bytes) for mode in document.modes)
    return [(name, predicted.peak_bytes, measured) for name, predicted, measured in modes if predicted is not None]
