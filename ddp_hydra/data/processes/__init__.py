"""Has other processes make the batches of a data set, so that the interpreter lock of a rank is the training loop's.

Threads that read and decode release the lock often, and take it again as often. On a GPU, the loop spends its time in
thousands of short calls, and waits for the lock after each of them: an H100 trained at half of its speed.

`dataset.py` is the data set that a rank sees, `remote.py` one process as the rank sees it, `program.py` what runs in
that process, `shared_batch.py` how a batch comes back without being copied into a message.
"""

from ddp_hydra.data.processes.dataset import InProcesses, Processes, made_by

__all__ = ["InProcesses", "Processes", "made_by"]
