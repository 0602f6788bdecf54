"""Measures a model on the hardware at hand: times, bytes and peaks, gathered in a profile.

Takes a module and a workload, gives `schema.profile.Profile`. Imports `graph`, `schema`, `progress`, `quantities` and
`errors`; torch, but never transformers, trl or the planner.
"""
