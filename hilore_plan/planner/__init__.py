"""Solves for the best plan under a memory budget.

Takes a profile document and a budget, gives a plan document. `timeline` says when memory peaks, `ilp` chooses, and
`simulate`, which shares no code with it, checks the choice in whole bytes. Imports `schema`, `progress`, `quantities`
and `errors` only, and never torch: plans are made on any machine. The solver is known to `ilp` alone.
"""
