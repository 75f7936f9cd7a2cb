"""What the command reads from a terminal and prints to it: signals, standard output, text, tracebacks."""
