"""Optimizer arithmetic over raw pointers, dispatched at run time to the best instruction set."""
