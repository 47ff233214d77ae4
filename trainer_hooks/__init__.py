"""Trainer hooks capture every step of a training run and load it back (floor 3)."""

if __name__ == "trainer_hooks":
    raise ImportError("import adacheck_store.trainer_hooks, not the bare name trainer_hooks")
