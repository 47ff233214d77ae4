"""Stores that somebody tampers with."""
