"""Charts of documents, for `hilore show --plot` and for notebooks: memory over time, bytes by action, the frontier.

Each draws into matplotlib axes that it is given, and knows nothing else of matplotlib:

    figure, axes = plt.subplots()
    peak_timeline(axes, plan, profile)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hilore_plan.cli.maps import action_colours, entry_name
from hilore_plan.planner.timeline import view_at
from hilore_plan.schema.plan import Entry, Plan, compressed
from hilore_plan.tidy.points import entry_timeline
from hilore_plan.tidy.units import entry_units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hilore_plan.schema.bench import Bench
    from hilore_plan.schema.profile import Mix, Profile

GIB = 2**30
PARTS = {"fixed": "#9a9a9a", "gradients": "#c9b458", "kept": "#1b6ca8", "rebuilt": "#e08e45", "working": "#b6465f"}


def peak_timeline(axes: Axes, plan: Plan, profile: Profile, entry: Entry | None = None) -> None:
    """Bytes at every point of a step, by what holds them, against the budget."""
    entry = entry or plan.entries[-1]
    points = entry_timeline(entry, profile)
    layers = [[int(getattr(point, part)) / GIB for point in points] for part in PARTS]
    axes.stackplot(range(len(points)), layers, labels=list(PARTS), colors=list(PARTS.values()))
    axes.axhline(plan.budget.limit_bytes / GIB, color="black", linestyle="--", label=f"budget {plan.budget.asked}")
    marks = _landmarks([point.name for point in points])
    axes.set_xticks(marks, [points[number].name for number in marks], rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("GiB")
    axes.set_title(f"peak timeline at {entry_name(entry)}")
    axes.legend(fontsize=7, loc="lower center", ncols=3)


def bytes_by_action(axes: Axes, plan: Plan, profile: Profile, tokens_up_to: int | None = None) -> None:
    """What becomes of the bytes that storing everything would hold, per bucket of exposure at one size.

    Args:
        axes: where to draw.
        plan: the plan.
        profile: its profile.
        tokens_up_to: the size, as the plan's entries have it; the largest by default.
    """
    tokens = plan.entries[-1].tokens_up_to if tokens_up_to is None else tokens_up_to
    entries = [entry for entry in plan.entries if entry.tokens_up_to == tokens]
    sums = [_whole_bytes(entry, profile) for entry in entries]
    floor = [0.0] * len(entries)
    for action, colour in action_colours(plan).items():
        heights = [count[action] / GIB for count in sums]
        axes.bar(range(len(entries)), heights, 0.7, bottom=floor, color=colour, label=action)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.set_xticks(range(len(entries)), [_bucket_name(entry) for entry in entries], fontsize=7)
    axes.set_xlabel("exposure up to (x mean), and how often")
    axes.set_ylabel("GiB, counted whole")
    axes.set_title(f"bytes by action at {tokens} tokens")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)


def predicted_and_measured(axes: Axes, document: Plan | Bench) -> None:
    """Predicted peaks beside measured ones; what was not measured has no second bar."""
    pairs = _peaks(document)
    positions = range(len(pairs))
    axes.bar([p - 0.2 for p in positions], [predicted / GIB for _, predicted, _ in pairs], 0.4, label="predicted")
    found = [(position, measured) for position, (_, _, measured) in enumerate(pairs) if measured is not None]
    if found:
        axes.bar([p + 0.2 for p, _ in found], [measured / GIB for _, measured in found], 0.4, label="measured")
    axes.set_xticks(list(positions), [name for name, _, _ in pairs], fontsize=7, rotation=20, ha="right")
    axes.set_ylabel("peak, GiB")
    axes.set_title("predicted and measured" if found else "predicted; nothing was measured")
    axes.legend(fontsize=7, loc="lower center")


def predicted_and_measured_error(axes: Axes, mixes: Sequence[Mix]) -> None:
    """Gradient errors of random sets of compressed units, on micro-batches that the calibration did not see."""
    largest = max((max(mix.predicted, mix.measured) for mix in mixes), default=1.0) or 1.0
    positive = [value for mix in mixes for value in (mix.predicted, mix.measured) if value > 0]
    ends = [min(positive, default=largest / 10) / 1.5, largest * 1.5]
    axes.plot(ends, ends, color="black", linewidth=0.8, label="predicted = measured")
    axes.fill_between(
        ends, [end * 0.7 for end in ends], [end * 1.4 for end in ends], color="#d8d8d8", label="0.7 to 1.4"
    )
    axes.scatter([mix.measured for mix in mixes], [mix.predicted for mix in mixes], s=25, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.tick_params(which="both", labelsize=6)
    axes.set_xlabel("measured relative error")
    axes.set_ylabel("predicted")
    axes.set_title(f"{len(mixes)} mixes kept aside")
    axes.legend(fontsize=7, loc="upper left")


def frontier(axes: Axes, bench: Bench) -> None:
    """Speed over peak memory, both relative to gradient checkpointing: up and left is better."""
    for mode in bench.modes:
        axes.scatter(mode.peak_vs_gc, mode.throughput_vs_gc, marker="*" if mode.name == "plan" else "o", s=80)
        axes.annotate(mode.name, (mode.peak_vs_gc, mode.throughput_vs_gc), xytext=(5, 5), textcoords="offset points")
    axes.set_title("what memory buys")
    _relative_to_gc(axes)


def budget_risk_speed(axes: Axes, rows: Iterable[Mapping[str, Any]], *, gc_peak_bytes: int | None = None) -> None:
    """A sweep: speed over peak memory, one line per risk budget; budgets that no plan fits into are left out.

    Args:
        axes: where to draw.
        rows: what `hilore plan --sweep-budget ... --sweep-risk ... --csv FILE` writes, one mapping per row, as from
            `csv.DictReader`; its columns `risk`, `peak_bytes` and `speed_vs_gc` are read.
        gc_peak_bytes: the peak of gradient checkpointing, to show memory relative to it and not in GiB.
    """
    unit = GIB if gc_peak_bytes is None else gc_peak_bytes
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        peak, speed = _number(row["peak_bytes"]), _number(row["speed_vs_gc"])
        if peak is not None and speed is not None:
            lines.setdefault(_risk_name(row["risk"]), []).append((peak / unit, speed))
    for name, line in lines.items():
        peaks, speeds = zip(*sorted(line), strict=True)
        axes.plot(peaks, speeds, marker=".", label=name)
    axes.set_title("what memory and risk buy")
    axes.legend(fontsize=8, loc="lower right")
    _relative_to_gc(axes)
    if gc_peak_bytes is None:
        axes.set_xlabel("peak memory, GiB")


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


def _whole_bytes(entry: Entry, profile: Profile) -> Mapping[str, int]:
    """By action, the bytes that the units of an entry would hold if they were stored."""
    sums: Counter[str] = Counter()
    for row in entry_units(entry, profile):
        if row.decided:
            sums[row.action if row.codec is None else compressed(row.codec)] += row.whole_bytes or 0
    return sums


def _bucket_name(entry: Entry) -> str:
    edge = "any" if entry.exposure_up_to is None else f"{entry.exposure_up_to:.3g}"
    return f"{edge}\n{entry.frequency:.0%}" + ("\nno grad." if entry.gradients == "none" else "")


def _landmarks(names: list[str]) -> list[int]:
    """The points to write on the axis: about ten, and in any case the turn from forward to backward and the end."""
    every = max(1, len(names) // 10)
    turn = names.index("head")
    return sorted({turn, len(names) - 1, *(n for n in range(0, len(names) - every, every) if abs(n - turn) >= every)})


def _peaks(document: Plan | Bench) -> list[tuple[str, int, int | None]]:
    if isinstance(document, Plan):
        entries = ((entry_name(entry), entry.predicted, entry.measured) for entry in document.entries)
        return [(name, p.peak_bytes, None if m is None else m.peak_bytes) for name, p, m in entries]
    modes = ((mode.name, mode.predicted, mode.peak_bytes) for mode in document.modes)
    return [(name, predicted.peak_bytes, measured) for name, predicted, measured in modes if predicted is not None]


def _number(cell: Any) -> float | None:
    """The number in a cell of a table; what is empty is None in Python, nothing in a CSV file, and NaN in pandas."""
    number = math.nan if cell is None or cell == "" else float(cell)
    return None if math.isnan(number) else number


def _risk_name(risk: Any) -> str:
    text = f"{risk:g}" if isinstance(risk, float) else str(risk)
    return "exact" if text in ("0", "0.0") else f"risk {text}"


def _relative_to_gc(axes: Axes) -> None:
    axes.set_xlabel("peak memory, x GC")
    axes.set_ylabel("throughput, x GC")
    axes.grid(visible=True, alpha=0.3)
    axes.margins(0.15)
