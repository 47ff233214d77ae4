"""Tests of the trainer hooks."""
