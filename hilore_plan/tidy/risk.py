"""Rows about compression: the gradient error that each codec on each unit of each block causes, as calibrated."""

from __future__ import annotations

from typing import NamedTuple

from hilore_plan.schema.profile import BlockClass, Risk, UnitRisk


class RiskRow(NamedTuple):
    """One codec on one unit of one block; `Tables.risk` says what the fields are."""

    block: int
    class_name: str
    unit: str
    codec: str
    local: float
    propagated: float
    spread: float
    rho: float


def risk_rows(classes: tuple[BlockClass, ...], risk: Risk) -> list[RiskRow]:
    """Every calibrated case, by block."""
    cases = zip(classes, risk.units, strict=True)
    rows = [row for cls, units in cases for unit in units for row in _unit_rows(cls, unit, risk.damping)]
    return sorted(rows, key=lambda row: row.block)


def _unit_rows(cls: BlockClass, unit: UnitRisk, damping: float) -> list[RiskRow]:
    spreads = unit.spread or (0.0,) * len(cls.blocks)
    found = zip(cls.blocks, unit.local, unit.propagated, spreads, unit.rho(damping), strict=True)
    return [RiskRow(block, cls.name, unit.unit, unit.codec, *numbers) for block, *numbers in found]
