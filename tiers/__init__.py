"""Tiers are the places that keep records, behind one interface (floor 1)."""

if __name__ == "tiers":
    raise ImportError("import adacheck_store.tiers, not the bare name tiers")
