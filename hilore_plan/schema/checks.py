"""What types cannot say of a document: that its numbers make sense, and that its parts fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from hilore_plan.errors import FileError
from hilore_plan.schema.plan import Entry, Plan
from hilore_plan.schema.profile import BlockClass, ClassMeasure, Point, Profile, Risk, Transient, WithoutGradients
from hilore_plan.schema.record import Record

# nothing that is measured or asked for comes near; a few times as much, and sums would be more than a float holds
LARGEST = 1e100


def check_profile(profile: Profile, path: str) -> None:
    """Refuse a profile that the planner could not work with.

    Raises:
        FileError: naming the first field that does not fit.
    """
    _refuse_first(path, _profile_faults(profile))


def check_plan(plan: Plan, path: str) -> None:
    """Refuse a plan that leaves a block out, treats one twice, or is out of order.

    Raises:
        FileError: naming the first field that does not fit.
    """
    _refuse_first(path, _plan_faults(plan))


def _refuse_first(path: str, faults: Iterator[str]) -> None:
    for fault in faults:
        raise FileError(f"{path} is not valid: {fault}", hint="it was edited or is corrupt: make it anew")


def _profile_faults(profile: Profile) -> Iterator[str]:
    yield from _out_of_bounds(profile, "")
    yield from _twice("block_names", profile.block_names)
    yield from _twice("classes", [c.name for c in profile.classes])
    yield from _planned("classes", (block for c in profile.classes for block in c.blocks), len(profile.block_names))
    for number, block_class in enumerate(profile.classes):
        yield from _class_faults(block_class, f"classes[{number}]")
    yield from _ascending("points", [point.tokens for point in profile.points])
    for number, point in enumerate(profile.points):
        yield from _point_faults(profile, point, f"points[{number}]")
    if profile.risk is not None:
        yield from _risk_faults(profile, profile.risk)


def _risk_faults(profile: Profile, risk: Risk) -> Iterator[str]:
    if len(risk.units) != len(profile.classes):
        yield f"risk.units has {len(risk.units)} entries where there are {len(profile.classes)} classes"
    for index, (units, block_class) in enumerate(zip(risk.units, profile.classes, strict=False)):
        names = {value.name for value in block_class.values if value.keepable}
        seen: set[tuple[str, str]] = set()
        for number, unit in enumerate(units):
            at = f"risk.units[{index}][{number}]"
            if unit.unit not in names:
                yield f"{at}.unit is {unit.unit!r}, which is no recovery unit of {block_class.name}"
            if unit.codec not in profile.codecs:
                yield f"{at}.codec is {unit.codec!r}, which is not among the profile's codecs"
            if (unit.unit, unit.codec) in seen:
                yield f"{at} has {unit.unit!r} with {unit.codec!r} for the second time"
            seen.add((unit.unit, unit.codec))
            blocks = len(block_class.blocks)
            yield from _lengths(unit, {"local": blocks, "propagated": blocks}, at)
            if unit.spread:
                yield from _lengths(unit, {"spread": blocks}, at)


def _class_faults(block_class: BlockClass, at: str) -> Iterator[str]:
    count = len(block_class.values)
    yield from _twice(f"{at}.values", [value.name for value in block_class.values])
    made = {number for number, value in enumerate(block_class.values) if value.kind != "op"}
    for number, op in enumerate(block_class.ops):
        if not made.issuperset(op.inputs):
            yield f"{at}.ops[{number}] reads a value that is not among the block's inputs nor made by an op before it"
        made.update(op.outputs)
        if any(not 0 <= index < count for index in (*op.inputs, *op.outputs)):
            yield f"{at}.ops[{number}] uses a value that is not among the {count} of its class"
        if not set(op.exact_inputs) <= set(op.inputs):
            yield f"{at}.ops[{number}].exact_inputs has a value that is not among its inputs"
    for number, value in enumerate(block_class.values):
        if any(not 0 <= stage < block_class.stages for stage in value.slot_stages):
            yield f"{at}.values[{number}].slot_stages names a stage that is not among the {block_class.stages}"


def _point_faults(profile: Profile, point: Point, at: str) -> Iterator[str]:
    if len(point.classes) != len(profile.classes):
        yield f"{at}.classes has {len(point.classes)} entries where there are {len(profile.classes)} classes"
    if len(point.outside.block_gradient_bytes) != len(profile.block_names):
        yield f"{at}.outside.block_gradient_bytes does not have one entry per block"
    for number, (measure, block_class) in enumerate(zip(point.classes, profile.classes, strict=False)):
        yield from _measure_faults(measure, block_class, f"{at}.classes[{number}]")
    if point.without_gradients is not None:
        yield from _without_faults(profile, point.without_gradients, f"{at}.without_gradients")


def _without_faults(profile: Profile, found: WithoutGradients, at: str) -> Iterator[str]:
    if len(found.classes) != len(profile.classes):
        yield f"{at}.classes has {len(found.classes)} entries where there are {len(profile.classes)} classes"
    for number, (measure, block_class) in enumerate(zip(found.classes, profile.classes, strict=False)):
        place = f"{at}.classes[{number}]"
        yield from _lengths(measure, {"stage_working_bytes": block_class.stages}, place)
        yield from _asked_faults(measure, block_class, place)


def _measure_faults(measure: ClassMeasure, block_class: BlockClass, at: str) -> Iterator[str]:
    values = len(block_class.values)
    lengths = {
        "value_bytes": values,
        "op_seconds": len(block_class.ops),
        "narrow_bytes": values,
        "narrow_seconds": values,
        "stage_working_bytes": block_class.stages,
    }
    if measure.op_working_bytes:
        lengths["op_working_bytes"] = len(block_class.ops)
    yield from _lengths(measure, lengths, at)
    yield from _asked_faults(measure, block_class, at)
    yield from _forward_faults(measure, values, at)
    if measure.codec_bytes.keys() != measure.codec_seconds.keys():
        yield f"{at}.codec_seconds is not of the codecs of codec_bytes"
    for field, codecs in (("codec_bytes", measure.codec_bytes), ("codec_seconds", measure.codec_seconds)):
        for codec, numbers in codecs.items():
            if len(numbers) != values:
                yield f"{at}.{field}.{codec} has {len(numbers)} numbers where its class needs {values}"


def _asked_faults(measure: ClassMeasure | Transient, block_class: BlockClass, at: str) -> Iterator[str]:
    if len(measure.asked_values) not in (0, block_class.stages):
        yield f"{at}.asked_values has {len(measure.asked_values)} stages where its class has {block_class.stages}"
    if [len(each) for each in measure.asked_values] != [len(each) for each in measure.asked_bytes]:
        yield f"{at}.asked_bytes does not have one number for each of asked_values"
    if measure.asked_peaks and [len(each) for each in measure.asked_peaks] != [
        len(each) + 1 for each in measure.asked_values
    ]:
        yield f"{at}.asked_peaks does not have one number more than asked_values, for each stage"
    for stage, asked in enumerate(measure.asked_values):
        slots = {number for number, value in enumerate(block_class.values) if stage in value.slot_stages}
        if len(set(asked)) < len(asked) or not slots.issuperset(asked):
            yield f"{at}.asked_values[{stage}] is not values that have slots in that stage, each once"


def _forward_faults(measure: ClassMeasure, values: int, at: str) -> Iterator[str]:
    found = measure.forward_values
    if any(not 0 <= value < values or found.count(value) > 2 for value in found):
        yield f"{at}.forward_values is not values of its class, each at most twice"
    if len(measure.forward_peaks) != (len(found) + 1 if measure.forward_peaks else 0):
        yield f"{at}.forward_peaks does not have one number more than forward_values"


def _lengths(record: Record, lengths: Mapping[str, int], at: str) -> Iterator[str]:
    for field, expected in lengths.items():
        found = len(getattr(record, field))
        if found != expected:
            yield f"{at}.{field} has {found} numbers where its class needs {expected}"


def _plan_faults(plan: Plan) -> Iterator[str]:
    yield from _out_of_bounds(plan, "")
    yield from _twice("block_names", plan.block_names)
    yield from _twice("classes", [c.name for c in plan.classes])
    yield from _planned("classes", (block for c in plan.classes for block in c.blocks), len(plan.block_names))
    yield from _ascending("entries", [_place(entry) for entry in plan.entries])
    if plan.entries[-1].gradients != "live":
        yield "entries has none for micro-batches that begin with gradients"
    for number, entry in enumerate(plan.entries):
        yield from _entry_faults(plan, entry, f"entries[{number}]")


def _place(entry: Entry) -> tuple[int, bool, float]:
    """Where an entry stands in the order of a plan."""
    exposure = float("inf") if entry.exposure_up_to is None else entry.exposure_up_to
    return entry.tokens_up_to, entry.gradients == "live", exposure


def _entry_faults(plan: Plan, entry: Entry, at: str) -> Iterator[str]:
    members = {c.name: set(c.blocks) for c in plan.classes}
    planned = sorted(block for blocks in members.values() for block in blocks)
    if sorted(block for group in entry.groups for block in group.blocks) != planned:
        yield f"{at}.groups does not have each of the {len(planned)} planned blocks exactly once"
    for number, group in enumerate(entry.groups):
        if not set(group.blocks) <= members.get(group.class_name, set()):
            yield f"{at}.groups[{number}] has blocks that are not of the class {group.class_name!r}"


def _twice(at: str, names: Sequence[str]) -> Iterator[str]:
    if len(set(names)) != len(names):
        first = next(name for number, name in enumerate(names) if name in names[:number])
        yield f"{at} has the name {first[:40]!r} twice"


def _planned(at: str, blocks: Iterable[int], count: int) -> Iterator[str]:
    found = list(blocks)
    if len(set(found)) != len(found):
        yield f"{at} has a block twice"
    if not set(found) <= set(range(count)):
        yield f"{at} has a block that is not among the {count} of the model"
    elif len(found) < count:
        yield f"{at} leaves out {count - len(found)} of the model's {count} blocks"


def _ascending(at: str, keys: Sequence[int] | Sequence[tuple[int, bool, float]]) -> Iterator[str]:
    if any(not left < right for left, right in pairwise(keys)):  # type: ignore[operator]
        yield f"{at} are not in ascending order"


def _out_of_bounds(record: Record, at: str) -> Iterator[str]:
    for name, value in record:
        yield from _out_of_bounds_in(value, f"{at}.{name}".lstrip("."))


def _out_of_bounds_in(value: object, at: str) -> Iterator[str]:
    if isinstance(value, Record):
        yield from _out_of_bounds(value, at)
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _out_of_bounds_in(item, f"{at}[{number}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _out_of_bounds_in(item, f"{at}.{key}")
    elif isinstance(value, (int, float)) and not 0 <= value <= LARGEST:
        yield f"{at} is {'negative' if value < 0 else 'too large'}"
