"""Solves for the best plan under a memory budget and a risk of gradient error.

Takes a profile document, a budget and a risk, gives a plan document. `timeline` says when memory peaks, `risk` what
compression costs in error, `ilp` chooses, and `simulate`, which shares no code with it, checks the choice in whole
bytes and by the rules of `inexact`. `share` spreads one risk over the exposures of micro-batches, `sweep` draws the
frontier. Imports `schema`, `progress`, `quantities` and `errors` only, and never torch: plans are made on any machine.
The solver is known to `ilp` alone.
"""
