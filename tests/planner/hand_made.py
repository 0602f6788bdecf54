"""Views of one or two blocks made by hand, each about one thing that the program of a block has to get right.

Sizes are odd on purpose: no two sets of units weigh the same, so that a byte that is counted wrong shows. What codecs
take has the bytes of its numbers plus those of a scale per group, as real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from strategies import Graph, outside, profile_of, slots_by_stage

from hilore_plan.planner.timeline import View, view_at
from hilore_plan.schema.plan import compressed
from hilore_plan.schema.profile import BlockClass, Point
from hilore_plan.schema.record import Mode

MODE = Mode(step_seconds=100.0, peak_bytes=1000)
GROUP = 16  # bytes of a value that share a scale of 1 byte
SECONDS = {"int8": 0.125, "int4": 0.3125}

# by unit: the squared error of a step with it in int8; int4 errs 20 times as much
Risks = Mapping[str, float]


def attention() -> View:
    """x -> q -> (out, lse) -> y: lse and out fit an exact q alone; without one they are rebuilt."""
    graph = Graph()
    x = graph.input("x", 31, keepable=True)
    q = graph.op("q", [x], 83, 1.5, 0)
    out, _ = graph.op_many("sdpa", [q], [("out", 59, (0,)), ("lse", 7, (0,))], 5.0)
    graph.op("y", [out], 47, 2.75, 0)
    return view_of(graph, 1, {"q": 0.5, "out": 0.25, "y": 1.0}, exact={"sdpa": (q,)})


def two_steps() -> View:
    """x -> a -> m -> b -> z, and z wants b exact: unless b is kept, errors in a reach it through m, no slot."""
    graph = Graph()
    x = graph.input("x", 23, keepable=True)
    a = graph.op("a", [x], 97, 7.0, 1)
    m = graph.op("m", [a], 13, 0.25)
    b = graph.op("b", [m], 71, 0.5, 0, 1)
    graph.op("z", [b], 41, 9.0, 0)
    return view_of(graph, 2, {"a": 0.125, "b": 2.0}, exact={"z": (b,)})


def pair() -> View:
    """x -> a -> (p, r): one of them is inexact as soon as the other is, if it is rebuilt; z wants r exact."""
    graph = Graph()
    x = graph.input("x", 19, keepable=True)
    a = graph.op("a", [x], 89, 6.0, 1)
    p, r = graph.op_many("pair", [a], [("p", 53, (1,)), ("r", 37, (0, 1))], 0.75)
    graph.op("z", [p, r], 29, 8.0, 0)
    return view_of(graph, 2, {"a": 0.25, "p": 0.5}, exact={"z": (r,)})


def stages() -> View:
    """x -> a -> wide -> b -> wider -> c and d from a and c: what is rebuilt in one of three stages and needed later."""
    graph = Graph()
    x = graph.input("x", 17, keepable=True)
    a = graph.op("a", [x], 61, 2.0, 2)
    wide = graph.op("wide", [a], 151, 0.5)
    b = graph.op("b", [wide], 43, 1.25, 1, narrow="bfloat16")
    wider = graph.op("wider", [b], 211, 0.75)
    c = graph.op("c", [wider], 79, 3.5, 0)
    graph.op("d", [a, c], 103, 1.0, 0, 2)
    return view_of(graph, 3, {"c": 0.75, "d": 0.25})


def carried() -> View:
    """x -> wide -> b and a, b -> c: wide, no slot, is read in the first stage and, for a, in the second."""
    graph = Graph()
    x = graph.input("x", 13, keepable=True)
    wide = graph.op("wide", [x], 137, 4.0)
    b = graph.op("b", [wide], 31, 1.5, 0)
    graph.op("c", [b], 67, 2.25, 0)
    graph.op("a", [wide], 59, 3.0, 1)
    return view_of(graph, 2, {"b": 0.5, "a": 1.0})


VIEWS: dict[str, Callable[[], View]] = {made.__name__: made for made in (attention, two_steps, pair, stages, carried)}


def twice(view: View) -> View:
    """The block and another like it, whose units err in the reverse order and half as much."""
    (rho,) = view.rho
    values = sorted({value for value, _ in rho})
    other = dict(zip(values, reversed(values), strict=True))
    second = {(value, action): rho[other[value], action] / 2 for value, action in rho}
    cls = replace(view.classes[0], blocks=(0, 1))
    around = outside(2, parameter_bytes=11, head_working_bytes=5)
    return replace(view, blocks=(0, 1), class_of=(0, 0), classes=(cls,), outside=around, rho=(rho, second))


def view_of(graph: Graph, stages: int, risks: Risks, exact: Mapping[str, tuple[int, ...]] | None = None) -> View:
    """The view of one block of a graph: the units named in `risks` have both codecs, ops in `exact` exact inputs."""
    cls = guarded(graph.block_class("Layer", [0], stages), exact or {})
    sizes = graph.measure(1, stages).value_bytes
    taken = [size if value.name in risks else 0 for size, value in zip(sizes, cls.values, strict=True)]
    codecs = {
        "int8": tuple(size // 2 + -(-size // GROUP) for size in taken),
        "int4": tuple(size // 4 + -(-size // GROUP) for size in taken),
    }
    measure = graph.measure(1, stages).model_copy(
        update={
            "codec_bytes": codecs,
            "codec_seconds": {codec: (seconds,) * len(sizes) for codec, seconds in SECONDS.items()},
            "stage_working_bytes": tuple(range(3, 3 + 2 * stages, 2)),
            **asked_in(cls),
            **run_of(cls),
        }
    )
    point = Point(
        tokens=1, batch=1, length=1, classes=(measure,), outside=outside(1), store=MODE, gc=MODE, recompute_scale=1.0
    )
    view = view_at(profile_of([cls], [point], micro_batches=2), 1)
    numbers = {value.name: number for number, value in enumerate(cls.values)}
    rho = {(numbers[name], compressed("int8")): risk for name, risk in risks.items()}
    rho |= {(numbers[name], compressed("int4")): 20 * risk for name, risk in risks.items()}
    return replace(view, rho=(rho,))


def asked_in(cls: BlockClass) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Backward asks for the newest values first and holds more with each; most of all when the second is there."""
    values = tuple(tuple(reversed(each)) for each in slots_by_stage(cls.values, cls.stages))
    return {
        "asked_values": values,
        "asked_bytes": tuple(tuple(range(1, 1 + 7 * len(each), 7)) for each in values),
        "asked_peaks": tuple((2, *((1, 3, 2)[number % 3] for number, _ in enumerate(each))) for each in values),
    }


def run_of(cls: BlockClass) -> dict[str, tuple[int, ...]]:
    """Forward lets go of each value when it has saved the next, and holds most in the middle."""
    slots = [number for number, value in enumerate(cls.values) if value.slot_stages]
    events = [slots[0], *(value for pair in zip(slots[1:], slots, strict=False) for value in pair)]
    middle = len(events) // 2
    return {
        "forward_values": tuple(events),
        "forward_peaks": tuple(20 - 3 * abs(number - middle) for number in range(len(events) + 1)),
    }


def guarded(cls: BlockClass, exact: Mapping[str, tuple[int, ...]]) -> BlockClass:
    """The class with inputs that have to be exact, by op."""
    ops = tuple(op.model_copy(update={"exact_inputs": exact.get(op.name, ())}) for op in cls.ops)
    return cls.model_copy(update={"ops": ops})
