"""Runs under torchrun on several nodes, each with an agent: what is lost there, and what is not."""
