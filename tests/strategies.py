"""Profiles made up for tests: one as a llama-like model would give it, and small random ones for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from hilore_plan.schema.profile import (
    BlockClass,
    ClassMeasure,
    Op,
    Outside,
    Point,
    Profile,
    Transient,
    Value,
    WithoutGradients,
)
from hilore_plan.schema.record import Environment, Mode, Model, Workload

ENVIRONMENT = Environment(
    hilore="0.1.0",
    python="3.11.0",
    torch="2.13.0",
    device="cpu",
    device_name="made up",
    threads=2,
    platform="linux",
)
PRICES = st.one_of(st.just(0.0), st.floats(1e-3, 2))  # to the solver, a cost of 1e-7 is none


@dataclass
class Graph:
    """A block graph under construction; bytes and seconds are per token."""

    values: list[Value] = field(default_factory=list)
    value_bytes: list[float] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    op_seconds: list[float] = field(default_factory=list)

    def input(self, name: str, size: float = 0, **fields: object) -> int:
        """Add an input or, with `kind="parameter"`, a parameter."""
        return self._value(name, size, {"kind": "input", **fields})

    def op(
        self,
        name: str,
        inputs: Sequence[int],
        size: float,
        seconds: float,
        *slots: int,
        recomputable: bool = True,
        **fields: str,
    ) -> int:
        """Add an op with one output of `size` bytes, which is a slot in the stages `slots`."""
        return self.op_many(name, inputs, [(name, size, slots)], seconds, recomputable=recomputable, **fields)[0]

    def op_many(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, float, tuple[int, ...]]],
        seconds: float,
        *,
        recomputable: bool = True,
        **fields: str,
    ) -> list[int]:
        """Add an op with several outputs."""
        made = [
            self._value(label, size, {"kind": "op", "slot_stages": slots, "keepable": bool(slots), **fields})
            for label, size, slots in outputs
        ]
        self.ops.append(Op(name=name, inputs=tuple(inputs), outputs=tuple(made), recomputable=recomputable))
        self.op_seconds.append(seconds)
        return made

    def _value(self, name: str, size: float, fields: dict[str, object]) -> int:
        self.values.append(Value.model_validate({"name": name, "dtype": "bfloat16", **fields}))
        self.value_bytes.append(size)
        return len(self.values) - 1

    def block_class(self, name: str, blocks: Sequence[int], stages: int) -> BlockClass:
        """The class that the graph describes."""
        return BlockClass(
            name=name,
            graph_hash=f"hash-of-{name}",
            blocks=tuple(blocks),
            parameters={"weight": "bfloat16[1]"},
            stages=stages,
            values=tuple(self.values),
            ops=tuple(self.ops),
        )

    def measure(self, tokens: int, stages: int, working: float = 0, forward_working: float = 0) -> ClassMeasure:
        """What one block costs at `tokens` tokens."""
        sizes = tuple(int(tokens * size) for size in self.value_bytes)
        narrow = tuple(size // 2 if value.narrow else 0 for size, value in zip(sizes, self.values, strict=True))
        return ClassMeasure(
            value_bytes=sizes,
            op_seconds=tuple(tokens * seconds for seconds in self.op_seconds),
            narrow_bytes=narrow,
            narrow_seconds=tuple(size * 2e-10 for size in narrow),
            stage_working_bytes=(int(tokens * working),) * stages,
            forward_working_bytes=int(tokens * forward_working),
        )


def outside(blocks: int, **fields: object) -> Outside:
    """Bytes outside the blocks: all zero but for the fields given."""
    zero = dict.fromkeys(Outside.model_fields, 0)
    return Outside.model_validate({**zero, "block_gradient_bytes": (0,) * blocks, **fields})


def profile_of(
    classes: Sequence[BlockClass], points: Sequence[Point], accumulation: bool = True, micro_batches: int = 2
) -> Profile:
    """A profile around classes and points."""
    blocks = sum(len(cls.blocks) for cls in classes)
    largest = points[-1]
    return Profile(
        created="2025-01-01T00:00:00+00:00",
        model=Model(name="MadeUpForCausalLM", parameters=1000, trainable=1000),
        workload=Workload(
            source="builtin:made-up",
            dtype="bfloat16",
            attention="sdpa",
            head="fused",
            batch=largest.batch,
            prompt_tokens=0,
            response_tokens=largest.length,
            accumulation=accumulation,
            micro_batches=micro_batches,
        ),
        environment=ENVIRONMENT,
        block_names=tuple(f"model.layers.{number}" for number in range(blocks)),
        classes=tuple(classes),
        points=tuple(points),
    )


def _norm(graph: Graph, name: str, source: int, hidden: int, stage: int) -> int:
    """An RMS norm as Hugging Face writes it: upcast, square, mean, rsqrt, multiply, downcast, weight."""
    weight = graph.input(f"{name}.weight", kind="parameter")
    second = 1e-10 * hidden
    up = graph.op(f"{name}.upcast", [source], 4 * hidden, second, stage, narrow="bfloat16", dtype="float32")
    square = graph.op(f"{name}.square", [up], 4 * hidden, second)
    rsqrt = graph.op(f"{name}.rsqrt", [square], 4, second, stage, dtype="float32")
    scaled = graph.op(f"{name}.scaled", [up, rsqrt], 4 * hidden, second)
    down = graph.op(f"{name}.downcast", [scaled], 2 * hidden, second, stage)
    return graph.op(f"{name}.out", [down, weight], 2 * hidden, second, stage)


def llama_graph(hidden: int = 576, intermediate: int = 1536, kv: float = 1 / 3, parts: int = 1) -> tuple[Graph, int]:
    """A llama-like block of `parts` attention-and-MLP pairs: about 20 units and 40 ops each, two stages each."""
    graph = Graph()
    stages = 2 * parts
    source = graph.input("hidden_states", 2 * hidden, keepable=True)
    cos = graph.input("cos", 128, shared=True)
    sin = graph.input("sin", 128, shared=True)
    flop = 2e-11  # seconds per multiply-add of a bf16 matmul on two CPU cores
    for part in range(parts):
        mlp, attention = stages - 2 - 2 * part, stages - 1 - 2 * part
        path = f"part{part}." if parts > 1 else ""
        normed = _norm(graph, f"{path}input_layernorm", source, hidden, attention)
        heads = []
        for name, size in (("q", hidden), ("k", int(hidden * kv)), ("v", int(hidden * kv))):
            weight = graph.input(f"{path}self_attn.{name}_proj.weight", kind="parameter")
            slots = (attention,) if name == "v" else ()
            made = graph.op(f"{path}self_attn.{name}_proj", [normed, weight], 2 * size, hidden * size * flop, *slots)
            heads.append(
                made if name == "v" else _rotary(graph, f"{path}self_attn.{name}", made, cos, sin, size, attention)
            )
        out, _ = graph.op_many(
            f"{path}self_attn.sdpa",
            heads,
            [
                (f"{path}self_attn.sdpa.out", 2 * hidden, (attention, attention)),
                (f"{path}self_attn.sdpa.lse", 36, (attention,)),
            ],
            hidden * 700 * flop,
        )
        o_weight = graph.input(f"{path}self_attn.o_proj.weight", kind="parameter")
        projected = graph.op(f"{path}self_attn.o_proj", [out, o_weight], 2 * hidden, hidden * hidden * flop)
        middle = graph.op(f"{path}residual", [source, projected], 2 * hidden, 1e-10 * hidden)
        source = _mlp(graph, path, middle, hidden, intermediate, flop, mlp)
    return graph, stages


def _rotary(graph: Graph, name: str, value: int, cos: int, sin: int, size: int, stage: int) -> int:
    turned = graph.op(f"{name}.rotate_half", [value], 2 * size, 2e-10 * size)
    left = graph.op(f"{name}.cos", [value, cos], 2 * size, 1e-10 * size)
    right = graph.op(f"{name}.sin", [turned, sin], 2 * size, 1e-10 * size)
    return graph.op(f"{name}.rotary", [left, right], 2 * size, 1e-10 * size, stage)


def _mlp(graph: Graph, path: str, middle: int, hidden: int, intermediate: int, flop: float, stage: int) -> int:
    normed = _norm(graph, f"{path}post_attention_layernorm", middle, hidden, stage)
    gate_weight = graph.input(f"{path}mlp.gate_proj.weight", kind="parameter")
    up_weight = graph.input(f"{path}mlp.up_proj.weight", kind="parameter")
    down_weight = graph.input(f"{path}mlp.down_proj.weight", kind="parameter")
    work = hidden * intermediate * flop
    gate = graph.op(f"{path}mlp.gate_proj", [normed, gate_weight], 2 * intermediate, work, stage)
    silu = graph.op(f"{path}mlp.act_fn", [gate], 2 * intermediate, 3e-10 * intermediate, stage)
    up = graph.op(f"{path}mlp.up_proj", [normed, up_weight], 2 * intermediate, work, stage)
    product = graph.op(f"{path}mlp.product", [silu, up], 2 * intermediate, 1e-10 * intermediate, stage)
    down = graph.op(f"{path}mlp.down_proj", [product, down_weight], 2 * hidden, work)
    return graph.op(f"{path}out", [middle, down], 2 * hidden, 1e-10 * hidden)


def llama_profile(
    blocks: int = 30,
    hidden: int = 576,
    intermediate: int = 1536,
    *,
    parts: int = 1,
    lengths: Sequence[int] = (256, 512, 768, 1024),
    batch: int = 1,
    vocabulary: int = 49152,
    accumulation: bool = True,
    head: str = "fused",
) -> Profile:
    """A profile with the proportions of a llama-like model in bf16 with AdamW on two CPU cores."""
    graph, stages = llama_graph(hidden, intermediate, parts=parts)
    cls = graph.block_class("LlamaDecoderLayer", range(blocks), stages)
    points = tuple(
        _llama_point(graph, stages, blocks, hidden, intermediate, parts, batch, length, vocabulary, head)
        for length in lengths
    )
    return profile_of([cls], points, accumulation)


def with_first_micro_batch(profile: Profile) -> Profile:
    """The profile with measures of a micro-batch that begins without gradients: the same working memory."""
    return profile.model_copy(update={"points": tuple(map(_with_first, profile.points))})


def _with_first(point: Point) -> Point:
    outside = point.outside
    first = WithoutGradients(
        classes=tuple(
            Transient(**{name: getattr(measure, name) for name in Transient.model_fields}) for measure in point.classes
        ),
        head_working_bytes=outside.head_working_bytes,
        embedding_working_bytes=outside.embedding_working_bytes,
        optimizer_working_bytes=outside.optimizer_working_bytes,
    )
    return point.model_copy(update={"without_gradients": first})


def _llama_point(
    graph: Graph,
    stages: int,
    blocks: int,
    hidden: int,
    intermediate: int,
    parts: int,
    batch: int,
    length: int,
    vocabulary: int,
    head: str,
) -> Point:
    tokens = batch * length
    per_block = 2 * parts * (hidden * hidden * 8 // 3 + 3 * hidden * intermediate)
    table = 2 * vocabulary * hidden
    parameters = blocks * per_block + table
    logits = 6 * vocabulary * (min(tokens, 256) if head == "fused" else tokens)
    slots = sum(size for size, value in zip(graph.value_bytes, graph.values, strict=True) if value.slot_stages)
    common = parameters * 6 + 16 * tokens
    working = 6 * intermediate
    forward = sum(graph.op_seconds) * tokens * blocks * 2
    return Point(
        tokens=tokens,
        batch=batch,
        length=length,
        classes=(graph.measure(tokens, stages, working, working),),
        outside=outside(
            blocks,
            parameter_bytes=parameters,
            optimizer_bytes=parameters * 4,
            batch_bytes=16 * tokens,
            gradient_bytes=parameters,
            head_gradient_bytes=table // 2,
            block_gradient_bytes=(per_block,) * blocks,
            embedding_bytes=512 * tokens,
            head_working_bytes=logits + 4 * tokens * hidden,
            embedding_working_bytes=table,
            optimizer_working_bytes=table,
        ),
        store=Mode(step_seconds=3.2 * forward, peak_bytes=int(common + blocks * tokens * slots + logits)),
        gc=Mode(step_seconds=4.1 * forward, peak_bytes=int(common + tokens * (2 * hidden * blocks + slots) + logits)),
        recompute_scale=0.95,
    )


def slots_by_stage(values: Sequence[Value], stages: int) -> list[list[int]]:
    """For each stage of backward the values with slots in it."""
    return [[n for n, value in enumerate(values) if stage in value.slot_stages] for stage in range(stages)]


@st.composite
def _asked(draw: st.DrawFn, graph: Graph, stages: int) -> dict[str, object]:
    """In which order backward asks for values and what it then holds; or nothing of that."""
    if draw(st.booleans()):
        return {}
    values = tuple(tuple(draw(st.permutations(each))) for each in slots_by_stage(graph.values, stages))
    return {
        "asked_values": values,
        "asked_bytes": tuple(tuple(draw(st.integers(0, 60)) for _ in each) for each in values),
        "asked_peaks": tuple(tuple(draw(st.integers(0, 60)) for _ in range(len(each) + 1)) for each in values),
    }


@st.composite
def _run(draw: st.DrawFn, graph: Graph) -> dict[str, object]:
    """In which order forward saves its slots' values and lets go of some of them; or nothing of that."""
    if draw(st.booleans()):
        return {}
    slots = [number for number, value in enumerate(graph.values) if value.slot_stages]
    values = draw(st.permutations([*slots, *(value for value in slots if draw(st.booleans()))]))
    return {
        "forward_values": tuple(values),
        "forward_peaks": tuple(draw(st.integers(0, 60)) for _ in range(len(values) + 1)),
    }


@st.composite
def small_profiles(draw: st.DrawFn, max_blocks: int = 3, max_ops: int = 5) -> Profile:
    """Small random profiles: few blocks and units, so that every set of actions can be tried."""
    stages = draw(st.integers(1, 3))
    blocks = draw(st.integers(1, max_blocks))
    split = draw(st.integers(1, blocks))
    graphs = [draw(_graphs(stages, max_ops)) for _ in range(1 if split == blocks else 2)]
    ranges = [range(split), range(split, blocks)][: len(graphs)]
    classes = [
        graph.block_class(f"Layer{number}", where, stages)
        for number, (graph, where) in enumerate(zip(graphs, ranges, strict=True))
    ]
    size = st.integers(0, 40)
    working = st.tuples(*[size] * stages)
    measures = tuple(
        graph.measure(1, stages).model_copy(
            update={
                "stage_working_bytes": draw(working),
                "op_working_bytes": tuple(draw(st.sampled_from((0, 0, 9, 30))) for _ in graph.ops),
                "forward_working_bytes": draw(size),
                **draw(_asked(graph, stages)),
                **draw(_run(graph)),
            }
        )
        for graph in graphs
    )
    gradients = tuple(draw(size) for _ in range(blocks))
    head = draw(size)
    around = outside(
        blocks,
        parameter_bytes=draw(size),
        gradient_bytes=sum(gradients) + head + draw(size),
        head_gradient_bytes=head,
        block_gradient_bytes=gradients,
        head_working_bytes=draw(size),
        embedding_working_bytes=draw(size),
        optimizer_working_bytes=draw(size),
    )
    mode = Mode(step_seconds=100.0, peak_bytes=1000)
    point = Point(
        tokens=1, batch=1, length=1, classes=measures, outside=around, store=mode, gc=mode, recompute_scale=1.0
    )
    return profile_of(classes, [point], draw(st.booleans()), micro_batches=1)


@st.composite
def _graphs(draw: st.DrawFn, stages: int, max_ops: int) -> Graph:
    graph = Graph()
    size = st.integers(0, 50)
    graph.input("hidden_states", draw(size), keepable=True)
    graph.input("weight", kind="parameter")
    if draw(st.booleans()):
        graph.input("saved", draw(size), keepable=True, slot_stages=(draw(st.integers(0, stages - 1)),))
    stage = st.integers(0, stages - 1)
    for number in range(draw(st.integers(1, max_ops))):
        existing = st.integers(0, len(graph.values) - 1)
        inputs = sorted(draw(st.sets(existing, min_size=1, max_size=2)))
        outputs = [
            (f"v{number}.{label}", draw(size), tuple(sorted(draw(st.sets(stage, max_size=2)))))
            for label in range(draw(st.integers(1, 2)))
        ]
        seconds = float(draw(st.integers(0, 9)))
        narrow = {"narrow": "bfloat16"} if draw(st.integers(0, 3)) == 0 else {}
        graph.op_many(f"op{number}", inputs, outputs, seconds, recomputable=draw(st.integers(0, 5)) > 0, **narrow)
    return graph
