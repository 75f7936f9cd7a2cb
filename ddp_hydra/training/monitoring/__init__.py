"""Measures a run: the time of a step, its operations, its memory, the cost of its data, the slowest rank."""
