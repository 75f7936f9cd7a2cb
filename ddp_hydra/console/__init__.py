"""Handles the terminal of a command: signals, standard output, text, tracebacks."""
