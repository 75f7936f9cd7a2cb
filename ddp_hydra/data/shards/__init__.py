"""Tar shards that a wids index lists: reads, caches and writes them."""
