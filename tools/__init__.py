"""Tools are the verbs over a store: generators of typed rows and findings (floor 3)."""

if __name__ == "tools":
    raise ImportError("import adacheck_store.tools, not the bare name tools")
