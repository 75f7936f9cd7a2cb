"""Samplers: they say which samples each rank reads, and in which order.

The global sequence of an epoch is a pure function of (seed, epoch), and the position in it is counted in samples. A
global batch is the next `batch_size * world_size` samples of the sequence; the ranks share it evenly. So a run that
stops and resumes with another world size or batch size continues at the same position, and all ranks have equally many
full batches.
"""

from ddp_hydra.data.samplers.base import Sampler
from ddp_hydra.data.samplers.distributed import Distributed
from ddp_hydra.data.samplers.repeated import Repeated
from ddp_hydra.data.samplers.sharded import Chunked, Sharded
from ddp_hydra.data.samplers.weighted import Weighted

__all__ = ["Chunked", "Distributed", "Repeated", "Sampler", "Sharded", "Weighted"]
