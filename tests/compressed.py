"""A plan with compressed units and buckets of exposure, of the small made-up model that has been calibrated."""

from __future__ import annotations

import samples
from calibrated import calibrated

from hilore_plan.schema.plan import Action, Entry, Group, Plan, RiskBudget, compressed
from hilore_plan.schema.profile import Profile

LEAN: dict[str, Action] = {
    "hidden_states": "store",
    "input_layernorm.upcast": "cast",
    "self_attn.sdpa.out": "store",
    "mlp.gate_proj": compressed("int4"),
    "mlp.act_fn.out": "recompute",
}
CAREFUL: dict[str, Action] = {**LEAN, "mlp.gate_proj": compressed("int8"), "mlp.act_fn.out": compressed("int8")}
EXACT: dict[str, Action] = {**LEAN, "mlp.gate_proj": "store"}
# exposures up to, how often, and the share of the squared exposure
BUCKETS: tuple[tuple[float | None, float, float], ...] = ((0.0, 0.3, 0.0), (1.5, 0.5, 0.4), (None, 0.2, 0.6))


def profile() -> Profile:
    """Three equal blocks, measured at two sizes, with codecs."""
    return calibrated(samples.profile())


def plan() -> Plan:
    """Two sizes by three buckets of exposure, the riskier the less compressed."""
    base = samples.plan()
    entries = [_entry(entry, number) for entry in base.entries for number in range(len(BUCKETS))]
    risk = RiskBudget(asked="0.015", limit=0.015, price=12.0, expected=0.011, binding="risk")
    return base.model_copy(update={"entries": tuple(entries), "risk": risk})


def _entry(entry: Entry, number: int) -> Entry:
    edge, frequency, weight = BUCKETS[number]
    most, least = ((LEAN, CAREFUL), (CAREFUL, EXACT), (EXACT, EXACT))[number]
    groups = (
        Group(class_name="ExampleBlock", blocks=(0, 2), actions=most),
        Group(class_name="ExampleBlock", blocks=(1,), actions=least),
    )
    return entry.model_copy(
        update={"exposure_up_to": edge, "frequency": frequency, "weight": weight, "groups": groups, "measured": None}
    )
