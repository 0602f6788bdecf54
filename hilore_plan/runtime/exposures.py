"""A micro-batch's exposure from what a caller of `microbatch` knows of it."""

from __future__ import annotations

from typing import Any

import torch

from hilore_plan.errors import UsageError
from hilore_plan.exposure.exposure import exposure as exposure_norm
from hilore_plan.exposure.losses import LossConfig
from hilore_plan.exposure.normalisers import normaliser_for
from hilore_plan.exposure.predict import predict
from hilore_plan.schema.record import Norm

_NEEDED = ("advantages", "mask")


def exposure_of(coefficients: torch.Tensor | None, known: dict[str, Any], exposure: float | None, norm: Norm) -> float:
    """The absolute exposure: of the coefficients, or of those predicted from `known`.

    Raises:
        UsageError: it is said twice, `advantages` or `mask` are missing, or a value is not finite.
    """
    if exposure is not None or (coefficients is not None and known):
        raise UsageError(
            "the exposure of a micro-batch is given in more than one way",
            "give exposure=, or coefficients=, or advantages= and mask=",
        )
    if coefficients is None:
        coefficients = _predicted(known)
    return exposure_norm(coefficients, norm)


def _predicted(known: dict[str, Any]) -> torch.Tensor:
    missing = [name for name in _NEEDED if known.get(name) is None]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} are needed to tell the exposure", "or give exposure= or coefficients="
        )
    options = dict(known)
    loss = options.pop("loss", None) or LossConfig()
    config: LossConfig = LossConfig(loss_type=loss) if isinstance(loss, str) else loss  # type: ignore[arg-type]
    if options.get("normaliser") is None:
        options["normaliser"] = normaliser_for(config, tokens=options["mask"].sum())
    return predict(config, **options).coefficients
