"""dask-pytorch-ddp's modules: `from ddp_hydra.compat.dask_pytorch_ddp import dispatch, results, data`."""
