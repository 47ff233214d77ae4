"""Benchmarks: ratios within one run, medians, one table. Run with ``python -m tests.benchmarks``."""
