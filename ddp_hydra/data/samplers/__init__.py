"""Who reads what: positions in an epoch -> indices of the data set, for one rank.

The order of samples is a pure function of (seed, epoch) over the *global* sequence, and the position is
counted in samples. A global batch is the next `batch_size * world_size` samples of that sequence; the ranks
share it evenly. So a run that is stopped and goes on with another world size or batch size reads on where it left
off, and all ranks have equally many full batches.
"""

from ddp_hydra.data.samplers.base import Sampler
from ddp_hydra.data.samplers.distributed import Distributed
from ddp_hydra.data.samplers.partition import Partition
from ddp_hydra.data.samplers.repeated import Repeated
from ddp_hydra.data.samplers.sharded import Chunked, Sharded
from ddp_hydra.data.samplers.weighted import Weighted

__all__ = ["Chunked", "Distributed", "Partition", "Repeated", "Sampler", "Sharded", "Weighted"]
