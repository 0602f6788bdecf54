"""Heat maps of blocks and units: what a plan does with each, and what compressing each costs in gradient error.

Each draws into matplotlib axes that it is given, and knows nothing else of matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hilore_plan.schema.plan import Action, Entry, Plan, compressed
from hilore_plan.tidy.risk import risk_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hilore_plan.schema.profile import Profile, Risk

COLOURS: dict[Action, str] = {
    "store": "#1b6ca8",
    "cast": "#7cc4e8",
    compressed("int8"): "#2a9d5c",
    compressed("fp8_e4m3"): "#93d5a4",
    compressed("int4"): "#b5478f",
    "recompute": "#f2e6d0",
}
# for codecs that are not ours, in the order of their names
_OTHERS = ("#e08e45", "#6a5acd", "#c9b458", "#8b5a2b")
_NOTHING = "#ffffff"


def action_colours(plan: Plan) -> dict[Action, str]:
    """The actions that any entry of a plan uses, and the colour of each: the same ones in every picture of it."""
    used = {action for entry in plan.entries for group in entry.groups for action in group.actions.values()}
    unknown = sorted(used - COLOURS.keys())
    colours = COLOURS | {action: _OTHERS[n % len(_OTHERS)] for n, action in enumerate(unknown)}
    return {action: colours[action] for action in sorted(used, key=_rank)}


def entry_name(entry: Entry) -> str:
    """What an entry is for, in a few words."""
    name = f"{entry.tokens_up_to} tokens{', no gradients' if entry.gradients == 'none' else ''}"
    if entry.exposure_up_to is not None:
        return f"{name}, exposure {entry.exposure_up_to:.3g}"
    others = entry.frequency < 1  # there are other buckets of exposure, of which this one is the highest
    return f"{name}, any exposure" if others else name


def action_map(axes: Axes, plan: Plan, entry: Entry) -> None:
    """The action of every unit (rows) in every block (columns) of an entry."""
    colours = action_colours(plan)
    units = list(dict.fromkeys(unit for group in entry.groups for unit in group.actions))
    cells = [[_rgb(_NOTHING)] * len(plan.block_names) for _ in units]
    for group in entry.groups:
        for block in group.blocks:
            for unit, action in group.actions.items():
                cells[units.index(unit)][block] = _rgb(colours[action])
    if units:  # blocks that cannot be captured have none
        axes.imshow(cells, aspect="auto", interpolation="nearest")
    _label(axes, units, f"up to {entry_name(entry)}")
    for action, colour in colours.items():
        axes.plot([], [], linestyle="none", marker="s", color=colour, label=action)
    if colours:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=min(len(colours), 4))


def risk_map(axes: Axes, profile: Profile, risk: Risk, codec: str, *, scale: tuple[float, float] | None = None) -> None:
    """The relative gradient error that a codec on each unit (rows) in each block (columns) causes alone.

    Args:
        axes: where to draw.
        profile: the calibrated profile.
        risk: its risk.
        codec: which of its codecs.
        scale: the errors at the ends of the colour scale; by default the least and the largest of all codecs, so that
            the maps of one profile compare.
    """
    errors = {
        (row.unit, row.block): math.sqrt(row.rho) for row in risk_rows(profile.classes, risk) if row.codec == codec
    }
    units = list(dict.fromkeys(unit for unit, _ in errors))
    blocks = range(len(profile.block_names))
    # a logarithm has no colour for zero; the lightest stands for it as for what is not there
    cells = [[errors.get((unit, block), 0.0) or math.nan for block in blocks] for unit in units]
    least, largest = scale or risk_scale(profile, risk)
    if units:
        image = axes.imshow(
            cells, aspect="auto", interpolation="nearest", cmap="viridis_r", norm="log", vmin=least, vmax=largest
        )
        axes.figure.colorbar(image, ax=axes, label="relative error of a step")
    _label(axes, units, codec)


def risk_scale(profile: Profile, risk: Risk) -> tuple[float, float]:
    """The least and the largest error of all codecs that is not nothing."""
    errors = [math.sqrt(row.rho) for row in risk_rows(profile.classes, risk) if row.rho > 0]
    if not errors:
        return 1e-3, 1.0
    return min(errors), max(*errors, min(errors) * 1.01)  # a scale needs a length


def _label(axes: Axes, units: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(units)), units, fontsize=6)
    axes.set_xlabel("block")
    axes.locator_params(axis="x", integer=True)
    axes.set_title(title)


def _rank(action: Action) -> tuple[float, Action]:
    """What keeps most comes first; other people's codecs stand before `recompute`."""
    known = list(COLOURS)
    return (known.index(action) if action in known else known.index("recompute") - 0.5), action


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
