"""`parallel=ddp`: DistributedDataParallel, with its communication hooks and gradients in shared memory."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.training.parallel import Parallel, PartStep, does_not_use, weights
from ddp_hydra.training.parallel.sent_buffers import SentBuffers
from ddp_hydra.training.parallel.shared_memory import SharedGradients, prebuild_buckets
from ddp_hydra.training.train_step import TrainStep, sparse_weights

NS_PER_S = 1e9
HOOKS = ("auto", "none", "shared", "fp16", "bf16", "powersgd", "post_local_sgd")


class DDP(Parallel):
    """Wraps a training step in DistributedDataParallel. The only rank of a job needs no wrapper.

    conf/parallel/ddp.yaml describes the arguments.

    Raises:
        ConfigError: an argument has a value that is not allowed, or that the device does not support.
    """

    def __init__(
        self,
        world: World = ALONE,
        *,
        bucket_cap_mb: float = 25.0,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        comm_hook: str = "auto",
        powersgd_rank: int = 1,
        start_step: int = 1000,
        average_every_steps: int = 4,
        sync_batchnorm: bool = False,
        batchnorm: str = "broadcast",
    ) -> None:
        super().__init__(world)
        allowed = {"comm_hook": (comm_hook, HOOKS), "batchnorm": (batchnorm, ("broadcast", "average"))}
        for name, (value, values) in allowed.items():
            if value not in values:
                raise ConfigError(f"parallel.{name}={value}: give one of {', '.join(values)}")
        self.hook = comm_hook, powersgd_rank, start_step, average_every_steps
        self.sync_batchnorm, self.own_statistics = sync_batchnorm, batchnorm == "average"
        self.uses_all = not static_graph and not find_unused_parameters
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
        }

    def wrap(self, step: TrainStep) -> PartStep:
        world = self.world
        if self.sync_batchnorm and next(step.parameters()).device.type == "cpu":
            needed = "parallel.sync_batchnorm=true needs GPUs"
            raise ConfigError(f"{needed}: leave it out, or give parallel.batchnorm=average")
        if world.size == 1 or not any(parameter.requires_grad for parameter in step.parameters()):
            return PartStep(step, uses_all=self.uses_all, world=world)  # DDP would only cost time, or raise
        if self.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(step)
        # DDP sends all buffers in each step. Those of a loss, as weights of classes, seldom change.
        of_loss = {name: one for name, one in step.named_buffers() if name.startswith("criterion.")}
        unsent = weights.left_out(step) | of_loss
        weights.broadcast(unsent.values(), world)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, list(unsent))
        wrapped = DistributedDataParallel(step, process_group=world.group, **self.options)
        if self.own_statistics:
            wrapped.broadcast_buffers = False  # after DDP has sent rank 0's statistics to all
        if self.uses_all:
            prebuild_buckets(wrapped, world)
        part = DDPStep(step, wrapped, self.uses_all, world)
        part.own_statistics = self.own_statistics
        if step.criterion is not None and not self.own_statistics:
            part.buffers = self._buffers_of(step.criterion)
        part.exchange_by(*self.hook)
        return part

    def _buffers_of(self, loss: nn.Module) -> SentBuffers:
        shared = next((part.buffers for part in self.parts.values() if part.buffers.modules == (loss,)), None)
        return shared or SentBuffers(self.world, loss)


class DDPStep(PartStep):
    """A training step in DistributedDataParallel.

    Attributes:
        averager: averages the weights now and then; None: the gradients are the same on all ranks.
        compression: the state of a hook that keeps errors.
        own_statistics: each rank has BatchNorm statistics of its own.
        hook_s: seconds that the backward pass has waited in a hook.
    """

    wrapped: DistributedDataParallel
    shared: SharedGradients | None = None
    averager: Any = None
    compression: Any = None
    own_statistics = False
    hook_s = 0.0

    @contextmanager
    def sync_gradients(self, enabled: bool) -> Iterator[None]:
        used = super().sync_gradients(enabled)
        with used if enabled else self.wrapped.no_sync():
            yield
        if enabled and self.needed:
            try:
                self.wrapped._check_reducer_finalized()
            except RuntimeError as error:
                numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
                names = [self.needed[int(number)][0] for number in numbers[1].split()] if numbers else ["some weights"]
                raise does_not_use(names, "the loss of this step's last micro-batch") from error

    def release(self) -> None:
        # Hooks at the gradients end with DDP's reducer, and shared memory with DDP.
        super().release()
        self.shared = self.send_along = self.averager = self.compression = None

    def exchange_by(self, hook: str, powersgd_rank: int, start_step: int, average_every_steps: int) -> None:
        # A collective.
        if hook in ("auto", "shared"):
            model = self.wrapped.module
            is_dense = not sparse_weights(model) and all(part.device.type == "cpu" for part in model.parameters())
            if is_dense and self.world.is_on_one_host:
                self.shared = SharedGradients.of(self.wrapped, self.world)
            if self.shared is not None:
                self.send_along = self.shared.send_along
            elif hook == "shared":
                raise ConfigError("parallel.comm_hook=shared is for dense gradients on one host's CPUs: leave it out")
        elif hook in ("fp16", "bf16"):
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.wrapped.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
        elif hook == "powersgd":
            self.needs_even = hook  # the errors that it keeps have the weights of former steps
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            # Its error feedback needs two steps to begin with.
            group = self.world.group
            self.compression = powersgd.PowerSGDState(group, powersgd_rank, start_powerSGD_iter=max(2, start_step))
            compress: Callable[..., Any] = powersgd.powerSGD_hook
            if "nccl" not in self.world.backend:
                compress = _one_bucket_at_a_time(compress, self)
            self.wrapped.register_comm_hook(self.compression, compress)
        elif hook == "post_local_sgd":
            from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
            from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

            if len(every := set(self.world.gather_objects(self.world.local_size))) > 1:
                raise ConfigError(f"comm_hook={hook} needs equally many ranks on each host, not {sorted(every)}")
            on_host, _ = dist.new_subgroups(group_size=self.world.local_size, group=self.world.group)
            state = local_sgd.PostLocalSGDState(self.world.group, on_host, start_step)
            self.wrapped.register_comm_hook(state, local_sgd.post_localSGD_hook)
            self.averager = PeriodicModelAverager(average_every_steps, start_step, self.world.group)
            self.same_gradients, self.needs_even = False, hook

    @property
    def is_weighed(self) -> bool:  # type: ignore[override]
        return self.shared is not None and self.shared.is_weighed

    def held_s(self) -> float:
        return self.hook_s if self.shared is None else self.shared.held_s

    def exchange_s(self) -> float:
        times = self.wrapped._get_ddp_logging_data()
        if "backward_comm_time" not in times:
            return math.nan
        return max(0, times["backward_comm_time"] - times["backward_compute_comm_overlap_time"]) / NS_PER_S

    def after_step(self) -> None:
        if self.averager is not None:
            self.averager.average_parameters(self.step.parameters())

    def leave_out_step(self) -> None:
        super().leave_out_step()
        if self.compression is not None:
            for memory in (self.compression.error_dict, self.compression.p_memory_dict, self.compression.q_memory_dict):
                memory.clear()

    @torch.no_grad()
    def synchronise(self, *averages: nn.Module) -> None:
        for model in (self.step, *averages):
            if self.averager is not None:
                weights.average(model.parameters(), self.world)
            if self.own_statistics:
                weights.average(weights.statistics(model), self.world)


def _one_bucket_at_a_time(hook: Callable[[Any, Any], Any], part: DDPStep) -> Callable[[Any, Any], Any]:
    # Gloo pairs exchanges by the order in which ranks begin them. With two buckets under way, the second exchange of
    # one and the first exchange of the other would begin in any order.
    def run(state, bucket):  # DDP refuses annotations that are text
        gradients, began = hook(state, bucket), time.perf_counter()
        gradients.wait()
        part.hook_s += time.perf_counter() - began
        return gradients

    return run
