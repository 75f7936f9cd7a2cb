"""Serve an object store on loopback for benchmarks: photos, shards of them and canned listings."""
