"""Adds the tab *Runs* to TensorBoard: all runs and sweeps below its log directory.

The modules and the style sheet of page/ are sent to the browser as they are. Nothing is written. A request names a run
by an id, never a file by its path.
"""
