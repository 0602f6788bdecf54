"""Apply a plan in training: the user's forward runs untouched, hooks keep or drop what autograd saves.

Takes a model and a plan, gives a `Runtime`. May import graph, codecs, exposure, schema and what is below them. The
rules that it keeps are in RULES.md; the code names them as R1 to R10.
"""
