"""Format v1: heads, arrays, keys, ids. Imports nothing of the other floors; see FORMAT.md."""

if __name__ == "format":
    raise ImportError("import adacheck_store.format, not format")
