"""Benchmarks: ratios within one run, medians, one table. Run `python -m tests.benchmarks`."""
