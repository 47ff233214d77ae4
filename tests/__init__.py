"""Tests of adacheck-store; helpers are imported as tests.<module>."""
