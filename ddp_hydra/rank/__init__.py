"""Runs on the worker's host: starts, watches and ends the processes of ranks."""
