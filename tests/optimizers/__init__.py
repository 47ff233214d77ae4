"""Optimizers: their classes by proof, what is kept of those nobody knows, drift, wrong folds."""
