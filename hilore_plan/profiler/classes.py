"""Blocks that are alike, captured once where they can be: the classes of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hilore_plan.errors import CaptureError
from hilore_plan.graph.attention import scored
from hilore_plan.graph.capture import capture
from hilore_plan.graph.fingerprint import graph_hash
from hilore_plan.graph.recovery_units import BlockGraph, GraphOp, GraphValue, block_graph, parameter_descriptions
from hilore_plan.graph.signature import Call, mode_key, tensor_key
from hilore_plan.profiler.calls import shared_storages, storage_of
from hilore_plan.profiler.opaque import OpaqueClass, opaque_class
from hilore_plan.profiler.ops import OpMeasures, measure_ops, reran_ops
from hilore_plan.schema.profile import BlockClass, Op, Value

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class CapturedClass:
    """A class of blocks: the graph of its first member, and its record."""

    graph: BlockGraph
    record: BlockClass

    @property
    def first(self) -> int:
        """The block that stands for the class where it is measured."""
        return self.record.blocks[0]

    @property
    def slot_stages(self) -> Sequence[int]:
        """The stage of each slot, in the order of saving."""
        return [slot.stage for slot in self.graph.slots]

    @property
    def slot_values(self) -> Sequence[int]:
        """The value that each slot is a view of, in the order of saving."""
        return [slot.value for slot in self.graph.slots]

    @property
    def own_inputs(self) -> list[int]:
        """Places, among a call's tensors, of the inputs that are alive for this block alone."""
        pairs = zip(self.graph.values, self.record.values, strict=True)
        inputs = (value for value, written in pairs if value.kind == "input" and not written.shared)
        return [value.place for value in inputs if value.place is not None]

    def measure(self, block: nn.Module, call: Call) -> OpMeasures:
        """Seconds of every op and bytes of every value."""
        return measure_ops(self.graph, block, call)

    def rerun_seconds(self, measures: OpMeasures) -> float:
        """What checkpointing one block runs again."""
        return sum(measures.op_seconds[op] for op in reran_ops(self.graph))


FoundClass = CapturedClass | OpaqueClass
# a graph, or the reason why there is none
Captured = BlockGraph | str


def find_classes(blocks: Sequence[nn.Module], calls: Sequence[Call]) -> list[FoundClass]:
    """Groups blocks in the order of their first members.

    The blocks of a class have equal graphs and parameters. Those that cannot be captured are of one class if they look
    and are called alike, and fail for the same reason.
    """
    members: dict[Hashable, list[int]] = {}
    captured: dict[Hashable, Captured] = {}
    for group in _alike(blocks, calls):
        for likeness, result, found in _captured(blocks, calls, group):
            # without graphs that could be compared, what looks different is taken to be different
            key = (likeness, group[0]) if isinstance(result, str) else likeness
            members.setdefault(key, []).extend(found)
            captured.setdefault(key, result)
    order = sorted(members, key=lambda key: min(members[key]))
    names = _class_names([blocks[min(members[key])] for key in order])
    shared = shared_storages(calls)
    return [
        _class(name, captured[key], blocks, calls, tuple(sorted(members[key])), shared)
        for name, key in zip(names, order, strict=True)
    ]


def _alike(blocks: Sequence[nn.Module], calls: Sequence[Call]) -> list[list[int]]:
    """Blocks that should have one graph: equal modules with equal settings, called alike."""
    groups: dict[Hashable, list[int]] = {}
    for index, (block, call) in enumerate(zip(blocks, calls, strict=True)):
        groups.setdefault(_likeness(block, call), []).append(index)
    return list(groups.values())


def _likeness(block: nn.Module, call: Call) -> Hashable:
    modules = list(block.modules())
    settings = tuple((type(module), _settings(module)) for module in modules)
    tensors = tuple((tensor_key(tensor), tuple(tensor.shape)) for tensor in call.tensors)
    device = call.tensors[0].device.type if call.tensors else "cpu"
    parameters = tuple(parameter_descriptions(block).items())
    return settings, parameters, _structure(call), tensors, mode_key(modules, device)


def _structure(call: Call) -> Hashable:
    try:
        return call.structure_key()
    except CaptureError as error:
        return call.spec, call.positions, error.message


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes that may steer a forward; a block's own number does not, or the last member's graph tells."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name != "layer_idx"}
    return tuple(sorted(plain.items()))


def _captured(
    blocks: Sequence[nn.Module], calls: Sequence[Call], group: list[int]
) -> Iterator[tuple[Hashable, Captured, list[int]]]:
    """Key, graph and members; the first and last member are captured, and all of them where those two differ."""
    first = _graph(blocks[group[0]], calls[group[0]])
    key = _key(first, blocks[group[0]])
    last = group[-1]
    if last == group[0] or _key(_graph(blocks[last], calls[last]), blocks[last]) == key:
        yield key, first, group
        return
    for index in group:
        graph = _graph(blocks[index], calls[index])
        yield _key(graph, blocks[index]), graph, [index]


def _graph(block: nn.Module, call: Call) -> Captured:
    try:
        return block_graph(capture(block, call))
    except CaptureError as error:
        return error.message


def _key(result: Captured, block: nn.Module) -> Hashable:
    made = ("uncaptured", result) if isinstance(result, str) else graph_hash(result)
    return made, tuple(parameter_descriptions(block).items())


def _class_names(firsts: Sequence[nn.Module]) -> list[str]:
    """The module's class name, numbered where several classes share it."""
    kinds = [type(block).__name__ for block in firsts]
    total, seen, names = Counter(kinds), Counter[str](), []
    for kind in kinds:
        seen[kind] += 1
        names.append(f"{kind}.{seen[kind]}" if total[kind] > 1 else kind)
    return names


def _class(
    name: str,
    result: Captured,
    blocks: Sequence[nn.Module],
    calls: Sequence[Call],
    members: tuple[int, ...],
    shared: set[int],
) -> FoundClass:
    places = _shared_places([calls[index] for index in members], shared)
    if isinstance(result, str):
        return opaque_class(name, result, blocks, calls, members, places)
    return CapturedClass(result, _record(name, result, blocks[members[0]], members, places))


def _shared_places(calls: Sequence[Call], shared: set[int]) -> set[int]:
    """Places of the tensors that other blocks are given as well, in each of these calls."""
    places = range(len(calls[0].tensors))
    return {place for place in places if all(storage_of(call.tensors[place]) in shared for call in calls)}


def _record(
    name: str, graph: BlockGraph, block: nn.Module, members: tuple[int, ...], places: Collection[int]
) -> BlockClass:
    return BlockClass(
        name=name,
        graph_hash=graph_hash(graph),
        blocks=members,
        parameters=parameter_descriptions(block),
        stages=graph.stages,
        values=tuple(_value(value, value.kind == "input" and value.place in places) for value in graph.values),
        ops=tuple(_op(op, graph) for op in graph.ops),
    )


def _op(op: GraphOp, graph: BlockGraph) -> Op:
    return Op(
        name=op.name,
        inputs=op.inputs,
        outputs=op.outputs,
        recomputable=op.recomputable,
        exact_inputs=tuple(dict.fromkeys(scored(op, graph))),
    )


def _value(value: GraphValue, shared: bool) -> Value:
    return Value(
        name=value.name,
        kind=value.kind,
        dtype=str(value.fake.dtype).removeprefix("torch."),
        slot_stages=value.slot_stages,
        keepable=value.keepable and not shared,
        shared=shared,
        narrow=None if value.narrow is None else str(value.narrow).removeprefix("torch."),
    )
