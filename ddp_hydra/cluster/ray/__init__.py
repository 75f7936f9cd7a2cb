"""A Dask cluster whose scheduler and workers Ray places. Nothing here is imported before `cluster=ray` is chosen."""
