"""Redundancy: which ranks hold copies of the same state, proven, and what is therefore kept where.

Pure: no process groups, no tiers. What ranks tell each other is in rounds of an abstract exchange.
"""
