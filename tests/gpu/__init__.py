"""What a device may do to a capture: the same tests on a CUDA device, and on one in name only."""
