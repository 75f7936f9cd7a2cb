"""`parallel=dp`: DataParallel, one rank that splits each batch among all GPUs that it sees."""

from __future__ import annotations

from torch.nn.parallel import DataParallel

from ddp_hydra.errors import ConfigError
from ddp_hydra.training.parallel import Parallel, PartStep
from ddp_hydra.training.train_step import TrainStep


class DP(Parallel):
    """Wraps the model of a step in DataParallel.

    Raises:
        ConfigError: there are several ranks, or the task trains parts of the model, which it calls by their names.
    """

    one_rank_name = "dp"

    def wrap(self, step: TrainStep) -> PartStep:
        if step.update:
            raise ConfigError(
                f"parallel=dp trains a whole model, and the task its part {step.update}: give parallel=ddp"
            )
        step.wrap(DataParallel)
        return super().wrap(step)
