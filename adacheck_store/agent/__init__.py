"""The agent: a node's process that holds replicas of training state for its peers.

What it decides is in state machines without threads, sockets or bytes: `core`.
"""
