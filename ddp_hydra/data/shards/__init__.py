"""Tar shards that a wids index lists: reading, keeping and making them."""
