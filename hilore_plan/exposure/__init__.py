"""How much a micro-batch can move the policy.

Takes a loss's settings with log-probs, advantages and masks, or a file of rollouts; gives the coefficients c_t =
dLoss/dlogp_t, their norm (the exposure), what is exactly zero, and buckets of exposure. May import `errors`, `progress`
and `quantities`; torch only where tensors are, so that `buckets` and `rollouts` load without it.
"""
