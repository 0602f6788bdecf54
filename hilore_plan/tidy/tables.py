"""The tables themselves, and the way to them: `hilore_plan.frames`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from hilore_plan.errors import UsageError
from hilore_plan.schema.plan import Plan
from hilore_plan.schema.profile import Profile
from hilore_plan.tidy.entries import EntryRow, plan_entries, profile_entries
from hilore_plan.tidy.fit import check_fit
from hilore_plan.tidy.points import PointRow, plan_points
from hilore_plan.tidy.risk import RiskRow, risk_rows
from hilore_plan.tidy.units import UnitRow, plan_units, profile_units

if TYPE_CHECKING:
    import pandas as pd

# missing integers keep their type (a float would round bytes above 2^53), missing reals are NaN, missing words NA
_DTYPES: dict[Any, str] = {
    int: "int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
    bool: "bool",
    str: "string",
    str | None: "string",
}


@dataclass(frozen=True)
class Tables:
    """A plan or a profile as tidy pandas tables. Each is made when it is first asked for.

    In the lists of columns, `int`, `real`, `word` and `bool` stand for `int64`, `float64`, `string` and `bool`; what
    may be missing is NA in integers (`Int64`) and words, and NaN in reals. Seconds are of a whole step with all its
    micro-batches, bytes of one process. Rows are in the order of entries, then of blocks or of time.
    """

    document: Plan | Profile
    profile: Profile | None = None

    @cached_property
    def units(self) -> pd.DataFrame:
        """What happens to every value: a row per entry, block and unit.

        Of a plan these are its decisions. Of a profile they are the choices: a row for each action that a plan may
        choose, as if it were the only one in its block; `entry` counts the measured points. Without its profile a plan
        knows nothing of bytes, seconds and rho: they are missing.

        Columns:
            entry (int): row of `entries`.
            block (int): position in `block_names`.
            class_name (word): the class of equal blocks.
            unit (word): name of the value within its block.
            decided (bool): False for values that no plan decides on and that cost something all the same: those that
                autograd keeps in any case, and those that recovery makes on its way. Only a plan with its profile has
                them.
            action (word): `store`, `cast`, `compress` or `recompute`.
            codec (word or missing): the codec of `compress`.
            kept_bytes (Int64): held from forward to backward; of an entry, they add up to `kept_bytes` of `timeline` at
                the point `head`.
            whole_bytes (Int64): what `store` would hold; 0 for what is alive anyway.
            seconds (real): to encode and decode, or to run the value's op again; of an entry, they add up to the
                `recompute_seconds` of `entries`. An op with several outputs is charged to the first that was not kept.
            rho (real): squared relative error of a step's gradient with this action in every micro-batch: 0 if the
                action is exact, missing if it was not calibrated.
        """
        if isinstance(self.document, Plan):
            return _table(UnitRow, plan_units(self.document, self.profile))
        return _table(UnitRow, profile_units(self.document))

    @cached_property
    def entries(self) -> pd.DataFrame:
        """What each entry is for and what it costs: a row per entry of a plan, or per measured point of a profile.

        A profile has only the columns that say nothing about a plan; the others are missing.

        Columns:
            entry (int): from 0.
            tokens_up_to (int): the largest micro-batch, in tokens.
            store_step_seconds, gc_step_seconds (real), store_peak_bytes, gc_peak_bytes (int): the two plain modes at
                that size.
            gradients (word): `none` for micro-batches that begin without gradients, `live` for others.
            exposure_up_to (real): the highest exposure over the mean one; infinite in the highest bucket.
            frequency, weight (real): the part of the micro-batches of that size in this bucket of exposure, and their
                part of the squared exposure.
            limit_bytes (Int64): the budget.
            predicted_peak_bytes, measured_peak_bytes (Int64), predicted_step_seconds, measured_step_seconds (real): the
                measured ones are missing where the plan was not run.
            recompute_seconds (real): the part of the predicted step that goes into recomputing and coding.
            speed_vs_gc (real): `gc_step_seconds` over `predicted_step_seconds`.
            error (real): relative gradient error of a step whose micro-batches all run under this entry.
            compressed_share (real): the part of the kept bytes that is kept in a codec's format, counted as whole ones.
            binding (word): the point of the timeline that makes the peak.
        """
        if isinstance(self.document, Plan):
            return _table(EntryRow, plan_entries(self.document))
        return _table(EntryRow, profile_entries(self.document))

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """What holds memory when: a row per entry and point of a step, at the entry's largest micro-batch.

        This is what the simulator says. Where a plan was measured and tightened, its predicted peaks have a correction
        on top.

        Columns:
            entry (int): row of `entries`.
            point (word): `forward:B`, `head`, `backward:B:STAGE`, `embedding` or `optimizer`.
            position (int): of the point in its timeline, from 0.
            fixed_bytes (int): parameters, optimizer state, the batch, and what comes before the first block.
            gradients_bytes, kept_bytes, rebuilt_bytes, working_bytes (int): gradients, what blocks keep for backward,
                what was decoded or made again, and what is needed only at this point.
            total_bytes (int): the sum of these five.
            limit_bytes (int): the budget.

        Raises:
            UsageError: for a profile, which decides on nothing, and for a plan without its profile.
        """
        if not isinstance(self.document, Plan):
            raise UsageError(
                "a profile has no timeline: it decides on nothing", hint="frames(plan, profile) has the plan's"
            )
        return _table(PointRow, plan_points(self.document, _needed(self.profile, "the timeline")))

    @cached_property
    def risk(self) -> pd.DataFrame:
        """What compression costs in gradient error: a row per block, unit and codec, as calibrated in fp32.

        All are squared errors of a step's gradient over its squared norm, with the unit compressed in every
        micro-batch; those of different units and blocks add up.

        Columns:
            block (int), class_name, unit, codec (word): as in `units`.
            local (real): in the block's own parameters.
            propagated (real): in everything below, as much as arrives there.
            spread (real): the relative standard error of both together; 0 if it was not calibrated.
            rho (real): `(local + damping * propagated) * (1 + 2 * sqrt(2) * spread)`, which plans count with.

        Raises:
            UsageError: for a plan without its profile, and for a profile made without codecs.
        """
        document = self.document
        profile = document if isinstance(document, Profile) else _needed(self.profile, "the table of risk")
        if profile.risk is None:
            raise UsageError(
                "the profile knows no risk: it was made without codecs",
                hint="hilore profile MODEL --codecs int8,fp8_e4m3,int4 calibrates them",
            )
        return _table(RiskRow, risk_rows(profile.classes, profile.risk))


def frames(document: Plan | Profile, profile: Profile | None = None) -> Tables:
    """A plan or a profile as tidy pandas tables: `units`, `entries`, `timeline` and `risk`.

        tables = hilore_plan.frames(plan, profile)
        tables.units.groupby(["entry", "action"]).kept_bytes.sum()

    Args:
        document: a plan or a profile.
        profile: of a plan, the profile that it was made from; without it there are no bytes and seconds per unit, no
            timeline and no risk.

    Returns:
        The tables; their columns, types and units are described at each of them.

    Raises:
        UsageError: if the document is neither, or if the profile is not the plan's.
    """
    if isinstance(document, Profile):
        if profile is not None:
            raise UsageError("a profile stands alone; two were given", hint="hilore_plan.frames(plan, profile)")
    elif not isinstance(document, Plan):
        raise UsageError(
            f"tables are made of a plan or a profile, not of a {type(document).__name__}",
            hint="hilore_plan.load_plan(FILE) and hilore_plan.load_profile(FILE) read them",
        )
    elif profile is not None:
        check_fit(document, profile)
    return Tables(document, profile)


def _needed(profile: Profile | None, purpose: str) -> Profile:
    if profile is None:
        raise UsageError(
            f"{purpose} needs the profile that the plan was made from", hint="hilore_plan.frames(plan, profile)"
        )
    return profile


def _table(row: type[NamedTuple], rows: Sequence[NamedTuple]) -> pd.DataFrame:
    """A column per field, of the type that the field says, also where there are no rows."""
    import pandas as pd

    hints = get_type_hints(row)
    columns = zip(*rows, strict=True) if rows else [()] * len(hints)
    named = zip(hints.items(), columns, strict=True)
    table: pd.DataFrame = pd.DataFrame(
        {name: pd.Series(list(values), dtype=_DTYPES[kind]) for (name, kind), values in named}
    )
    return table
