"""Measures a run: the time of a step, its operations, its memory, what data and exchange cost, the slowest rank."""
