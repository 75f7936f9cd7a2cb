"""Data sets, samplers and the loader. Nothing here knows of ranks, Dask or jobs."""
