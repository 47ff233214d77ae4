"""The demo: a real training run that is killed, restored, and compared bit for bit."""
