"""The calls of dask-pytorch-ddp and of wids, so that scripts that use them run with another import line.

Each module is thin: `ddp_hydra.dispatch` and `ddp_hydra.data` do the work. docs/coming-from/ lists what differs.
"""
