"""ddp_hydra: a Hydra config describes a training job, Dask places its ranks, DistributedDataParallel trains.

A run, in the order of the code: `cli` (one composed config) -> `job` (one run directory) -> `cluster`
(workers) -> `dispatch` (a gang of ranks on them) -> `rank` (one process, inside the process group) ->
`train` (the loop) -> `results` (what it says) -> `writers` (the files a person reads).
"""

__version__ = "0.1.0"
