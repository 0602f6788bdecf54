"""What the tables of profiles, plans and benches hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from hilore_plan.cli.risk_rows import bucket, plan_buckets, size_cells, size_column, update_notes
from hilore_plan.cli.tables import Column, Table
from hilore_plan.planner.block_view import ClassView
from hilore_plan.planner.explain import explain_binding
from hilore_plan.planner.timeline import view_at
from hilore_plan.quantities import format_bytes, format_seconds
from hilore_plan.schema.bench import Bench, ModeResult
from hilore_plan.schema.plan import Entry, Fingerprint, Plan
from hilore_plan.schema.profile import BlockClass, Profile
from hilore_plan.schema.record import Mode, Workload

Row = tuple[str, ...]

_UNITS_NOTE = "op: the time of the one op that makes the unit; or else: what a plan may do instead of storing it"
_WEIGHTS_NOTE = (
    "per block: the bytes that are kept, or that recompute saves; the time of the one op that makes the unit"
)


def describe(workload: Workload) -> str:
    """A workload in one line."""
    lora = f", LoRA rank {workload.lora_rank}" if workload.lora_rank else ""
    gradients = "accumulated" if workload.accumulation else "not accumulated"
    return (
        f"{workload.source}, {workload.dtype}{lora}: {workload.micro_batches} micro-batches of {workload.batch} x "
        f"({workload.prompt_tokens} + {workload.response_tokens}) tokens, {workload.head} head, gradients {gradients}"
    )


def profile_steps(profile: Profile) -> Table:
    """The two plain modes at every measured size."""
    columns = ("tokens", "store step", "store peak", "GC step", "GC peak", "GC costs", "GC saves")
    return Table(
        title=describe(profile.workload),
        columns=tuple(Column(title) for title in columns),
        rows=tuple(_plain_modes(point.tokens, point.store, point.gc) for point in profile.points),
        notes=(f"measured on {profile.environment.device_name}; store keeps everything, GC recomputes every block",),
    )


def profile_units(profile: Profile, number: int) -> Table:
    """The recovery units of one class of blocks, at the largest measured size."""
    block_class, tokens = profile.classes[number], profile.points[-1].tokens
    view = view_at(profile, tokens).classes[number]
    return Table(
        title=f"{block_class.name} (blocks {ranges(block_class.blocks)}), per block at {tokens} tokens",
        columns=(
            Column("unit", "name"),
            Column("dtype", "name"),
            Column("bytes"),
            Column("as cast"),
            Column("op"),
            Column("or else", "series"),
        ),
        rows=tuple(_unit_rows(block_class, view)),
        notes=(_UNITS_NOTE, *_whole_note(block_class, view)),
    )


def profile_outside(profile: Profile) -> Table:
    """What lives outside the blocks, at the largest measured size."""
    outside = profile.points[-1].outside
    names = (
        ("parameters", outside.parameter_bytes),
        ("optimizer state", outside.optimizer_bytes),
        ("gradients", outside.gradient_bytes),
        ("batch", outside.batch_bytes),
        ("before the first block", outside.embedding_bytes),
        ("head and loss while they run", outside.head_working_bytes),
        ("embedding's backward while it runs", outside.embedding_working_bytes),
        ("optimizer while it runs", outside.optimizer_working_bytes),
    )
    return Table(
        title=f"outside the blocks, at {profile.points[-1].tokens} tokens",
        columns=(Column("what", "name"), Column("bytes")),
        rows=tuple((name, format_bytes(count)) for name, count in names),
    )


def plan_entries(plan: Plan) -> Table:
    """Every entry of a plan beside what the two plain modes cost at the same size."""
    if plan.risk is not None:
        return plan_buckets(plan, plan.risk, describe(plan.workload))
    measured = any(entry.measured for entry in plan.entries)
    sizes = groupby(plan.entries, key=lambda entry: entry.tokens_up_to)
    return Table(
        title=describe(plan.workload),
        columns=(
            size_column(plan),
            Column("mode", "name"),
            Column("peak"),
            *((Column("measured"),) if measured else ()),
            Column("step"),
            Column("x GC"),
            Column("x store"),
            Column("peak is at", "name"),
        ),
        rows=tuple(row for _, found in sizes for row in _size_rows(list(found), measured=measured)),
        notes=(
            f"budget {plan.budget.asked} = {format_bytes(plan.budget.limit_bytes)} at every size",
            *update_notes(plan),
            f"solved by {plan.solver.name} to within {plan.solver.gap:.2%} of the best step time",
            explain_binding(plan.entries[-1]),
        ),
    )


def plan_units(plan: Plan, entry: Entry, profile: Profile | None) -> list[Table]:
    """What an entry does with each unit, a table per class; with the profile, also what a unit weighs."""
    return [_class_actions(entry, fingerprint, profile) for fingerprint in plan.classes]


def bench_modes(bench: Bench) -> Table:
    """The measured modes side by side."""
    return Table(
        title=f"{describe(bench.workload)}; {bench.pairs} rounds",
        columns=(
            Column("mode", "name"),
            Column("step"),
            Column("min..max"),
            Column("tokens/s"),
            Column("peak"),
            Column("speed\nx GC"),
            Column("peak\nx GC"),
            Column("gradient\nerror"),
        ),
        rows=tuple(_mode_row(mode) for mode in bench.modes),
        notes=(f"measured on {bench.environment.device_name}, torch {bench.environment.torch}: {bench.command}",),
    )


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7, 9-10` for the numbers 0, 1, 2, 3, 7, 9, 10."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)


def _plain_modes(tokens: int, store: Mode, gc: Mode) -> Row:
    return (
        str(tokens),
        format_seconds(store.step_seconds),
        format_bytes(store.peak_bytes),
        format_seconds(gc.step_seconds),
        format_bytes(gc.peak_bytes),
        f"{gc.step_seconds / store.step_seconds - 1:+.0%}" if store.step_seconds else "-",
        f"{1 - gc.peak_bytes / store.peak_bytes:.0%}" if store.peak_bytes else "-",
    )


def _unit_rows(block_class: BlockClass, view: ClassView) -> Iterable[Row]:
    for unit in view.units:
        yield (
            view.names[unit],
            block_class.values[unit].dtype,
            format_bytes(view.value_bytes[unit]),
            format_bytes(cast.bytes) if (cast := view.form(unit, "cast")) is not None else "-",
            _op_time(view, unit),
            _choices(view, unit),
        )


def _whole_note(block_class: BlockClass, view: ClassView) -> tuple[str, ...]:
    """What becomes of blocks that cannot be captured, on which a plan has nothing to decide."""
    if block_class.uncaptured is None:
        return ()
    forward, inside = view.ops[0], format_bytes(view.value_bytes[-1])
    again = f"checkpointed: {inside} are rebuilt in {format_seconds(forward.seconds)}"
    treated = again if forward.recomputable else f"stored, {inside}: its forward changes its own state"
    return (f"cannot be captured ({block_class.uncaptured}); each block is {treated}",)


def _op_time(view: ClassView, unit: int) -> str:
    maker = view.makers[unit]
    return "-" if maker is None else format_seconds(view.ops[maker].seconds)


def _choices(view: ClassView, unit: int) -> str:
    """What a plan may do with a unit instead of storing it."""
    forms = dict.fromkeys(form.action.partition(":")[0] for form in view.forms[unit])
    recompute = () if unit in view.forced else ("recompute",)
    return ", ".join((*forms, *recompute)) or "-"


def _size_rows(entries: Sequence[Entry], *, measured: bool) -> Iterable[Row]:
    """The entries of one size, and below them the two plain modes."""
    first = entries[0]
    for size, entry in zip(size_cells(entries), entries, strict=True):
        predicted = Mode(step_seconds=entry.predicted.step_seconds, peak_bytes=entry.predicted.peak_bytes)
        found = format_bytes(entry.measured.peak_bytes) if entry.measured else ""
        yield (size, "plan", *_mode_cells(predicted, found, first, measured=measured), entry.predicted.binding)
    for name, mode in (("GC", first.gc), ("store", first.store)):
        yield ("", name, *_mode_cells(mode, "", first, measured=measured), "")


def _mode_cells(mode: Mode, found: str, entry: Entry, *, measured: bool) -> Row:
    return (
        format_bytes(mode.peak_bytes),
        *((found,) if measured else ()),
        format_seconds(mode.step_seconds),
        _ratio(entry.gc.step_seconds, mode.step_seconds),
        _ratio(entry.store.step_seconds, mode.step_seconds),
    )


def _class_actions(entry: Entry, kind: Fingerprint, profile: Profile | None) -> Table:
    name = kind.name
    groups = [group for group in entry.groups if group.class_name == name]
    blocks: dict[tuple[str, str], list[int]] = {}
    for unit in groups[0].actions if groups else {}:
        for group in groups:
            blocks.setdefault((unit, group.actions.get(unit, "recompute")), []).extend(group.blocks)
    weights = _weights(profile, name, entry.tokens_up_to)
    extra = (Column("bytes"), Column("op")) if weights else ()
    note = _WEIGHTS_NOTE if weights else "--profile FILE adds what each unit weighs, --json gives every figure"
    return Table(
        title=f"{name}, micro-batches of at most {entry.tokens_up_to} tokens{_kind(entry)}",
        columns=(Column("unit", "name"), Column("action", "name"), *extra, Column("blocks", "series")),
        rows=tuple(
            (unit, action, *weights.get((unit, action), ()), ranges(where)) for (unit, action), where in blocks.items()
        ),
        notes=(note, f"cannot be captured ({kind.uncaptured}); no unit inside to decide on")
        if kind.uncaptured
        else (note,),
    )


def _kind(entry: Entry) -> str:
    begins = ", no gradients yet" if entry.gradients == "none" else ""
    exposed = "" if entry.exposure_up_to is None and entry.frequency == 1 else f", exposure {bucket(entry)}"
    return begins + exposed


def _weights(profile: Profile | None, name: str, tokens: int) -> dict[tuple[str, str], Row]:
    """Bytes of each unit of a class under each action, and seconds of the op that makes it."""
    views = view_at(profile, tokens).classes if profile is not None else ()
    view = next((view for view in views if view.name == name), None)
    if view is None:
        return {}
    return {
        (view.names[unit], action): (format_bytes(size), _op_time(view, unit))
        for unit in view.units
        for action, size in (
            *((form.action, form.bytes) for form in view.forms[unit]),
            *((action, view.value_bytes[unit]) for action in ("store", "recompute")),
        )
    }


def _mode_row(mode: ModeResult) -> Row:
    step = mode.step_seconds
    return (
        mode.name,
        format_seconds(step.median),
        f"{step.min:.2f}..{step.max:.2f} s",
        f"{mode.tokens_per_second:.0f}",
        format_bytes(mode.peak_bytes),
        f"{mode.throughput_vs_gc:.3f}",
        f"{mode.peak_vs_gc:.3f}",
        "0" if mode.gradient_error == 0 else f"{mode.gradient_error:.1e}",
    )


def _ratio(reference: float, seconds: float) -> str:
    return f"{reference / seconds:.2f}" if seconds else "-"
