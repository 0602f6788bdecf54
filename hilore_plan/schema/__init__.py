"""The documents that pass between the rooms: profile, plan and bench, as validated, versioned JSON.

Takes files, gives frozen pydantic records. Imports `errors` and `quantities` only, and never torch: whoever reads a
profile or a plan needs nothing else.
"""
