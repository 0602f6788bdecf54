"""Measures a model on the hardware at hand: times, bytes and peaks, gathered in a profile.

Takes a module and a workload, gives `schema.profile.Profile`. Imports `graph`, `schema`, `progress`, `quantities` and
`errors`, and of `runtime` what it does to blocks without a graph; torch, but never transformers, trl or the planner.
"""
