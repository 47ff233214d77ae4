"""A state machine over whole stores."""
