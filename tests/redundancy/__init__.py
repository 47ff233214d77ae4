"""Redundancy: found, classified, assigned, watched."""
