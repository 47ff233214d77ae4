"""The inherited suite of every tier, and what is special about each."""
