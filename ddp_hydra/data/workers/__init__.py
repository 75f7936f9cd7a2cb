"""Has processes make the batches of a data set: workers of torch's DataLoader, forked from a helper.

A process that trains has threads, a process group and a GPU, so it can't be forked. Its helper was taken before it had
any of these, or is a program of its own that has imported torch, and forks the workers.
"""

from ddp_hydra.data.workers.helper import open_files, take_helper
from ddp_hydra.data.workers.loader import InWorkers, UnpicklableInWorker, Workers, with_workers

__all__ = ["InWorkers", "UnpicklableInWorker", "Workers", "open_files", "take_helper", "with_workers"]
