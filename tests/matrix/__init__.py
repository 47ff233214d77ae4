"""The capture matrix: training as people do it, killed, restored in a new process, bit for bit."""
