"""Faults: processes killed at every failpoint, bits flipped in every file."""
