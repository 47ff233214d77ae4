"""Chaos: a real run on real processes that loses what a seed says, round after round."""
