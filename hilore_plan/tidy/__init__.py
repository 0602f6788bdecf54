"""Documents as tidy pandas tables, for notebooks and for whoever wants to compute with a plan.

Takes a plan (with its profile) or a profile, gives `Tables`: one row per block and unit, per entry, per point of the
timeline, per calibrated codec. The rows themselves are plain tuples; only `tables` knows pandas, and imports it when a
table is asked for. Imports `planner`, `schema` and `errors`, and never torch.
"""
