"""The documents are tested too."""
