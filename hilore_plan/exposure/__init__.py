"""How much a micro-batch can move the policy, and which rows of a step belong together.

Takes a loss's settings with log-probs, advantages and masks, or a file of rollouts; gives the coefficients c_t =
dLoss/dlogp_t, their norm (the exposure), what is exactly zero, and `regroup`, which divides a step's rows anew; the
planner cuts exposures into buckets. May import `errors`, `progress` and `quantities`; torch only where tensors are, so
that `rollouts` and `regroup` load without it.
"""

from hilore_plan.exposure.regroup import Regrouped, Row, leave_out, regroup

__all__ = ["Regrouped", "Row", "leave_out", "regroup"]
