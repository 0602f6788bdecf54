"""Runs a plan beside the other ways to do the same actor update, and compares time, peak and gradients.

Takes a plan, gives `schema.bench.Bench`, or the plan with its measured figures. Stands above every room but `cli`: each
mode runs in a process of its own, built by `integrations`, measured by `profiler`.
"""
