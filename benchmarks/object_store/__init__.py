"""An object store on loopback for benchmarks: photos, shards of them, canned listings, and the server of it all."""
