"""How much a micro-batch can move the policy: the place of the coefficients, the exposure and its buckets.

Empty while every action is exact, for then a plan depends on token counts alone. May import `graph`, `codecs` and
below.
"""
