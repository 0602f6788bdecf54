"""A small profile, plan and bench of one made-up model, for whoever reads documents."""

from __future__ import annotations

from itertools import groupby

from hilore_plan.schema.bench import Bench, ModeResult, Spread
from hilore_plan.schema.plan import Action, Budget, Entry, Fingerprint, Group, Plan, Prediction, RiskBudget, Solver
from hilore_plan.schema.profile import (
    BlockClass,
    ClassMeasure,
    Exposures,
    Mix,
    Op,
    Outside,
    Point,
    Profile,
    Risk,
    UnitRisk,
    Value,
)
from hilore_plan.schema.record import Environment, Mode, Model, Workload

MIB = 2**20

ENVIRONMENT = Environment(
    hilore="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    transformers="5.24.0",
    device="cpu",
    device_name="Example CPU",
    threads=2,
    platform="Linux-x86_64",
)
WORKLOAD = Workload(
    source="builtin:example",
    dtype="bfloat16",
    attention="sdpa",
    head="fused",
    batch=2,
    prompt_tokens=64,
    response_tokens=192,
)
MODEL = Model(name="ExampleForCausalLM", parameters=1_000_000, trainable=1_000_000)
BLOCKS = ("model.layers.0", "model.layers.1", "model.layers.2")
PARAMETERS = {"mlp.weight": "bfloat16[256, 64] trainable"}
UNITS = ("hidden_states", "input_layernorm.upcast", "self_attn.sdpa.out", "mlp.gate_proj", "mlp.act_fn.out")


def profile() -> Profile:
    """Three equal blocks, measured at two sizes."""
    return Profile(
        created="2026-01-01T00:00:00+00:00",
        model=MODEL,
        workload=WORKLOAD,
        environment=ENVIRONMENT,
        block_names=BLOCKS,
        classes=(_block_class(),),
        points=(_point(256), _point(512)),
    )


def plan(*, measured: bool = True) -> Plan:
    """Two entries; the larger one treats the last block apart."""
    keep: dict[str, Action] = dict.fromkeys(UNITS, "store")
    lean: dict[str, Action] = {
        **keep,
        "input_layernorm.upcast": "cast",
        "mlp.gate_proj": "recompute",
        "mlp.act_fn.out": "recompute",
    }
    small = (Group(class_name="ExampleBlock", blocks=(0, 1, 2), actions=keep),)
    large = (
        Group(class_name="ExampleBlock", blocks=(0, 1), actions=lean),
        Group(class_name="ExampleBlock", blocks=(2,), actions=keep),
    )
    return Plan(
        created="2026-01-01T00:00:00+00:00",
        model=MODEL,
        workload=WORKLOAD,
        environment=ENVIRONMENT,
        budget=Budget(asked="1.1x-gc", limit_bytes=418 * MIB),
        solver=Solver(name="highs", gap=0.001),
        block_names=BLOCKS,
        classes=(Fingerprint(name="ExampleBlock", graph_hash="0123abcd", blocks=(0, 1, 2), parameters=PARAMETERS),),
        entries=(_entry(256, small, measured=measured), _entry(512, large, measured=measured)),
    )


def calibrated_profile() -> Profile:
    """The same profile with two codecs, calibrated: int8 takes what the MLP makes, int4 its gate alone."""
    plain = profile()
    return plain.model_copy(
        update={
            "points": tuple(_with_codecs(point) for point in plain.points),
            "codecs": ("int8", "int4"),
            "risk": Risk(
                damping=0.25,
                units=(
                    (
                        _unit_risk("mlp.gate_proj", "int8", 1e-6),
                        _unit_risk("mlp.act_fn.out", "int8", 1.5e-6),
                        _unit_risk("mlp.gate_proj", "int4", 2e-4),
                    ),
                ),
                exposures=Exposures(norm="l2", mean=0.031, values=(0.0, 0.0, 0.5, 1.0, 1.5, 3.0)),
                held_out=(Mix(units=5, predicted=0.011, measured=0.012),),
                noise=0.054,
                source="reasoning-gym chain_sum",
                micro_batches=6,
            ),
        }
    )


def compressing_plan() -> Plan:
    """A plan of the calibrated profile: exact for high exposures, more and more compressed for lower ones."""
    exact = plan().entries[1]
    lean = exact.groups[0].actions
    int8: dict[str, Action] = {**lean, "mlp.gate_proj": "compress:int8", "mlp.act_fn.out": "recompute"}
    int4: dict[str, Action] = {**int8, "mlp.gate_proj": "compress:int4"}
    rows = ((0.0, int4, 0.027, 0.333, 0.0), (1.5, int8, 0.0017, 0.5, 0.28), (None, lean, 0.0, 0.167, 0.72))
    return plan().model_copy(
        update={
            "risk": RiskBudget(asked="0.015", limit=0.015, price=812.5, expected=0.0009, binding="risk"),
            "entries": tuple(
                exact.model_copy(
                    update={
                        "exposure_up_to": edge,
                        "frequency": frequency,
                        "weight": weight,
                        "predicted": exact.predicted.model_copy(
                            update={"error": error, "compressed_share": 0.4 if error else 0.0}
                        ),
                        "groups": (Group(class_name="ExampleBlock", blocks=(0, 1, 2), actions=actions),),
                    }
                )
                for edge, actions, error, frequency, weight in rows
            ),
        }
    )


def distinguishing(plan: Plan) -> Plan:
    """A plan with entries for micro-batches that begin without gradients, which recompute half as long as its own."""
    sizes = groupby(plan.entries, key=lambda entry: entry.tokens_up_to)
    kinds = ([*map(_without_gradients, found), *found] for found in (list(each) for _, each in sizes))
    return plan.model_copy(update={"entries": tuple(entry for found in kinds for entry in found)})


def _without_gradients(entry: Entry) -> Entry:
    less = entry.predicted.recompute_seconds / 2
    predicted = entry.predicted.model_copy(
        update={"recompute_seconds": less, "step_seconds": entry.predicted.step_seconds - less}
    )
    return entry.model_copy(update={"gradients": "none", "predicted": predicted})


def _with_codecs(point: Point) -> Point:
    measure = point.classes[0]
    gate, product = measure.value_bytes[4], measure.value_bytes[5]
    coded = measure.model_copy(
        update={
            "codec_bytes": {
                "int8": (0, 0, 0, 0, gate * 65 // 128, product * 65 // 128),
                "int4": (0, 0, 0, 0, gate * 17 // 64, 0),
            },
            "codec_seconds": {"int8": (0.0, 0.0, 0.0, 0.0, 0.0011, 0.0011), "int4": (0.0, 0.0, 0.0, 0.0, 0.0014, 0.0)},
        }
    )
    return point.model_copy(update={"classes": (coded,)})


def _unit_risk(unit: str, codec: str, rho: float) -> UnitRisk:
    return UnitRisk(unit=unit, codec=codec, local=(rho, rho, 2 * rho), propagated=(0.0, rho, rho))


def bench() -> Bench:
    """The plan beside the two plain modes."""
    return Bench(
        created="2026-01-01T00:00:00+00:00",
        command="hilore bench plans/example.json",
        pairs=7,
        workload=WORKLOAD,
        environment=ENVIRONMENT,
        modes=(_result("plan", 1.1, 410), _result("store", 1.02, 612), _result("gc", 1.31, 380)),
    )


def _block_class() -> BlockClass:
    return BlockClass(
        name="ExampleBlock",
        graph_hash="0123abcd",
        blocks=(0, 1, 2),
        parameters=PARAMETERS,
        stages=2,
        values=(
            Value(name="hidden_states", kind="input", dtype="bfloat16", keepable=True),
            Value(name="mlp.weight", kind="parameter", dtype="bfloat16"),
            Value(
                name="input_layernorm.upcast",
                kind="op",
                dtype="float32",
                slot_stages=(1,),
                keepable=True,
                narrow="bfloat16",
            ),
            Value(name="self_attn.sdpa.out", kind="op", dtype="bfloat16", slot_stages=(1,), keepable=True),
            Value(name="mlp.gate_proj", kind="op", dtype="bfloat16", slot_stages=(0,), keepable=True),
            Value(name="mlp.act_fn.out", kind="op", dtype="bfloat16", slot_stages=(0,), keepable=True),
        ),
        ops=(
            Op(name="input_layernorm.upcast", inputs=(0,), outputs=(2,)),
            Op(name="self_attn.sdpa", inputs=(2,), outputs=(3,)),
            Op(name="mlp.gate_proj", inputs=(3, 1), outputs=(4,)),
            Op(name="mlp.act_fn", inputs=(4,), outputs=(5,)),
        ),
    )


def _point(tokens: int) -> Point:
    share = tokens / 512
    return Point(
        tokens=tokens,
        batch=2,
        length=tokens // 2,
        classes=(
            ClassMeasure(
                value_bytes=tuple(int(count * MIB * share) for count in (2, 1, 4, 2, 8, 8)),
                op_seconds=tuple(seconds * share for seconds in (0.0004, 0.006, 0.031, 0.0012)),
                narrow_bytes=(0, 0, int(2 * MIB * share), 0, 0, 0),
                narrow_seconds=(0.0, 0.0, 0.0003 * share, 0.0, 0.0, 0.0),
                stage_working_bytes=(int(4 * MIB * share), int(6 * MIB * share)),
                forward_working_bytes=int(3 * MIB * share),
            ),
        ),
        outside=Outside(
            parameter_bytes=100 * MIB,
            optimizer_bytes=200 * MIB,
            batch_bytes=1 * MIB,
            gradient_bytes=50 * MIB,
            head_gradient_bytes=10 * MIB,
            block_gradient_bytes=(10 * MIB, 10 * MIB, 10 * MIB),
            embedding_bytes=1 * MIB,
            head_working_bytes=int(20 * MIB * share),
            embedding_working_bytes=5 * MIB,
            optimizer_working_bytes=4 * MIB,
        ),
        store=Mode(step_seconds=1.02 * share, peak_bytes=int((352 + 260 * share) * MIB)),
        gc=Mode(step_seconds=1.31 * share, peak_bytes=int((352 + 28 * share) * MIB)),
        recompute_scale=1.05,
    )


def _entry(tokens: int, groups: tuple[Group, ...], *, measured: bool) -> Entry:
    point = _point(tokens)
    predicted = Prediction(
        step_seconds=1.1 * tokens / 512, peak_bytes=406 * MIB, recompute_seconds=0.08, binding="backward:2:0"
    )
    found = Mode(step_seconds=1.12 * tokens / 512, peak_bytes=410 * MIB)
    return Entry(
        tokens_up_to=tokens,
        predicted=predicted,
        measured=found if measured else None,
        store=point.store,
        gc=point.gc,
        groups=groups,
    )


def _result(name: str, seconds: float, mebibytes: int) -> ModeResult:
    return ModeResult(
        name=name,
        step_seconds=Spread(median=seconds, min=seconds * 0.98, max=seconds * 1.05),
        tokens_per_second=1024 / seconds,
        peak_bytes=mebibytes * MIB,
        throughput_vs_gc=1.31 / seconds,
        peak_vs_gc=mebibytes / 380,
        gradient_error=0.0,
        predicted=Mode(step_seconds=1.1, peak_bytes=406 * MIB) if name == "plan" else None,
    )
