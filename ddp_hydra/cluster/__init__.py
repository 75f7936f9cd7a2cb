"""Connects to any Dask cluster, chosen by one key: `cluster=…`."""
