"""Blocks that are alike, captured once: the classes of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hilore_plan.graph.capture import capture
from hilore_plan.graph.fingerprint import graph_hash
from hilore_plan.graph.recovery_units import BlockGraph, GraphValue, block_graph, parameter_descriptions
from hilore_plan.graph.signature import Call, mode_key, tensor_key
from hilore_plan.profiler.calls import shared_storages, storage_of
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


def find_classes(blocks: Sequence[nn.Module], calls: Sequence[Call]) -> list[CapturedClass]:
    """Groups blocks whose graphs and parameters are equal, in the order of their first members.

    Raises:
        CaptureError: a block's forward cannot be captured.
    """
    members: dict[Hashable, list[int]] = {}
    graphs: dict[Hashable, BlockGraph] = {}
    for group in _alike(blocks, calls):
        for key, graph, found in _captured(blocks, calls, group):
            members.setdefault(key, []).extend(found)
            graphs.setdefault(key, graph)
    shared = shared_storages(calls)
    order = sorted(members, key=lambda key: min(members[key]))
    names = _class_names([blocks[min(members[key])] for key in order])
    made = []
    for name, key in zip(names, order, strict=True):
        block_class = _record(name, graphs[key], blocks, calls, tuple(sorted(members[key])), shared)
        made.append(CapturedClass(graphs[key], block_class))
    return made


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
    return settings, parameters, call.structure_key(), tensors, mode_key(modules, device)


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes that may steer a forward; a block's own number does not, or the last member's graph tells."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name != "layer_idx"}
    return tuple(sorted(plain.items()))


def _captured(
    blocks: Sequence[nn.Module], calls: Sequence[Call], group: list[int]
) -> Iterator[tuple[Hashable, BlockGraph, list[int]]]:
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


def _graph(block: nn.Module, call: Call) -> BlockGraph:
    return block_graph(capture(block, call))


def _key(graph: BlockGraph, block: nn.Module) -> Hashable:
    return graph_hash(graph), tuple(parameter_descriptions(block).items())


def _class_names(firsts: Sequence[nn.Module]) -> list[str]:
    """The module's class name, numbered where several classes share it."""
    kinds = [type(block).__name__ for block in firsts]
    total, seen, names = Counter(kinds), Counter[str](), []
    for kind in kinds:
        seen[kind] += 1
        names.append(f"{kind}.{seen[kind]}" if total[kind] > 1 else kind)
    return names


def _record(
    name: str,
    graph: BlockGraph,
    blocks: Sequence[nn.Module],
    calls: Sequence[Call],
    members: tuple[int, ...],
    shared: set[int],
) -> BlockClass:
    member_calls = [calls[index] for index in members]
    return BlockClass(
        name=name,
        graph_hash=graph_hash(graph),
        blocks=members,
        parameters=parameter_descriptions(blocks[members[0]]),
        stages=graph.stages,
        values=tuple(_value(value, _is_shared(value, member_calls, shared)) for value in graph.values),
        ops=tuple(
            Op(name=op.name, inputs=op.inputs, outputs=op.outputs, recomputable=op.recomputable) for op in graph.ops
        ),
    )


def _is_shared(value: GraphValue, calls: Sequence[Call], shared: set[int]) -> bool:
    if value.kind != "input" or value.place is None:
        return False
    return all(storage_of(call.tensors[value.place]) in shared for call in calls)


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
