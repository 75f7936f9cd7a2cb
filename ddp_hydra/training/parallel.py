"""Wraps a training step for its ranks: averages gradients, weights and BatchNorm statistics over them.

The config chooses `parallel=ddp`, `dp` or `none`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.shared_memory import SharedGradients, has_sparse, prebuild_buckets
from ddp_hydra.training.train_step import TrainStep

SENT = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""Types that gloo and NCCL both send."""


def can_be_sent(tensor: Tensor) -> bool:
    return tensor.dtype in SENT and tensor.layout is torch.strided and not overlaps(tensor)


def overlaps(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > span


def left_out(module: nn.Module) -> dict[str, Tensor]:
    frozen = [(name, value) for name, value in module.named_parameters() if not value.requires_grad]
    return {name: value for name, value in [*module.named_buffers(), *frozen] if not can_be_sent(value)}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], world: World) -> None:
    # A collective. Sparse tensors stay as they are: all ranks have built the same, and no layer changes them in place.
    for tensor in tensors:
        if can_be_sent(tensor):
            world.send_from_rank_0(tensor)
        elif tensor.layout is torch.strided and not overlaps(tensor):
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            world.send_from_rank_0(content)
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))


HOOKS = ("auto", "none", "shared", "fp16", "bf16", "powersgd", "post_local_sgd")


class Parallel:
    """A training step among its ranks: called with a micro-batch, it returns what the task makes of it.

    Args:
        step: the training step.
        wrapped: the module that is called instead of it.
        uses_all: each step has to give all trained parameters a gradient.
        world: of this rank.

    Attributes:
        part: what the step trains: the model, or a part of it.
        same_gradients: all ranks have the same gradients after the backward pass.
        needs_even: name of a communication hook that needs losses over the same number of things in each step; "".
        shared: averages the gradients in memory that all ranks share; None: another way.
        averager: averages the weights now and then; None: the gradients are the same on all ranks.
        compression: the state of a hook that keeps errors; None for none.
        own_statistics: each rank has BatchNorm statistics of its own.
        hook_s: seconds that the backward pass has waited in a hook.
    """

    def __init__(self, step: TrainStep, wrapped: nn.Module, uses_all: bool = False, world: World = ALONE) -> None:
        self.step, self.world, self.wrapped, self.part = step, world, wrapped, step.part
        self.needed = [(name, one) for one, name in step.names().items() if uses_all and one.requires_grad]
        self.same_gradients, self.needs_even, self.own_statistics = True, "", False
        self.shared: SharedGradients | None = None
        self.averager: Any = None
        self.compression: Any = None
        self.hook_s = 0.0

    def __call__(self, batch: Any) -> Any:
        return self.wrapped(batch)

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[Any]:
        if enabled:
            return all_used(self.needed)
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()

    def exchange_by(self, hook: str, powersgd_rank: int, start_step: int, average_every_steps: int) -> None:
        # A collective.
        assert isinstance(self.wrapped, DistributedDataParallel)
        if hook in ("auto", "shared"):
            self.shared = _share(self.wrapped, self.world)
            if hook == "shared" and self.shared is None:
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

            on_host, _ = dist.new_subgroups(group_size=_ranks_per_host(self.world), group=self.world.group)
            state = local_sgd.PostLocalSGDState(self.world.group, on_host, start_step)
            self.wrapped.register_comm_hook(state, local_sgd.post_localSGD_hook)
            self.averager = PeriodicModelAverager(average_every_steps, start_step, self.world.group)
            self.same_gradients, self.needs_even = False, hook

    @property
    def is_weighed(self) -> bool:
        return self.shared is not None and self.shared.is_weighed

    def held_s(self) -> float:
        # DDP itself counts it as part of the backward pass.
        return self.hook_s if self.shared is None else self.shared.held_s

    def after_step(self) -> None:
        if self.averager is not None:
            self.averager.average_parameters(self.step.parameters())

    def discard_gradients(self) -> None:
        # A step was left out: later steps don't use what is left of its gradients.
        if self.compression is not None:
            for memory in (self.compression.error_dict, self.compression.p_memory_dict, self.compression.q_memory_dict):
                memory.clear()

    @torch.no_grad()
    def synchronise(self, *averages: nn.Module) -> None:
        # A collective. It makes the model and averages of it the same on all ranks, before validation or a save.
        for model in (self.step, *averages):
            if self.averager is not None:
                average(model.parameters(), self.world)
            if self.own_statistics:
                average(statistics(model), self.world)


@contextmanager
def all_used(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
    # DDP fails in the step after, and gives their numbers.
    yield
    unused = [name for name, parameter in parameters if parameter.grad is None and parameter.requires_grad]
    if unused:
        raise ConfigError(
            f"this step's loss does not depend on {shown(unused, 6)}: if that is so in each step, leave it out of the "
            "model or freeze it by trainer.freeze; if in some steps, give parallel.find_unused_parameters=true"
        )


def statistics(model: nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            yield from (buffer for buffer in (layer.running_mean, layer.running_var) if buffer is not None)


def average(tensors: Iterable[torch.Tensor], world: World) -> None:
    # A collective.
    for tensor in tensors:
        world.reduce(tensor)
        tensor /= world.size


def ddp(
    step: TrainStep,
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
) -> Parallel:
    """Wrap a training step in DistributedDataParallel. The only rank of a job needs no wrapper.

    Args:
        step: of a model that is on its device.
        world: of this rank.
        bucket_cap_mb: MiB of gradients that travel together.
        static_graph: the model uses the same parameters in each step, in the same order.
        gradient_as_bucket_view: gradients lie in the buckets, and are not copied there.
        find_unused_parameters: the model does not use all of its parameters in each step.
        comm_hook: how gradients travel. "none": by the backend, unchanged. "shared": through memory that ranks on the
            CPUs of one host share. "auto": "shared" where that is possible, else "none". "fp16", "bf16": in half as
            many bytes. "powersgd": as products of thin matrices (Vogels et al., 2019). "post_local_sgd": within each
            host only; the weights are averaged over all ranks now and then (Lin et al., 2020).
        powersgd_rank: width of those matrices.
        start_step: first steps in which powersgd does not compress, and post_local_sgd averages over all ranks.
        average_every_steps: steps between two averages of the weights by post_local_sgd.
        sync_batchnorm: BatchNorm normalises over the batches of all ranks (GPUs only).
        batchnorm: statistics of BatchNorm. "broadcast": before each step, all ranks take the statistics of rank 0.
            "average": each rank keeps its own, and their mean is evaluated and saved.

    Raises:
        ConfigError: an argument has a value that is not allowed, or that the device does not support.
    """
    for name, value, allowed in (("comm_hook", comm_hook, HOOKS), ("batchnorm", batchnorm, ("broadcast", "average"))):
        if value not in allowed:
            raise ConfigError(f"parallel.{name}={value}: give one of {', '.join(allowed)}")
    if sync_batchnorm and next(step.parameters()).device.type == "cpu":
        raise ConfigError("parallel.sync_batchnorm=true needs GPUs: leave it out, or give parallel.batchnorm=average")
    uses_all = not static_graph and not find_unused_parameters
    if world.size == 1:
        return Parallel(step, step, uses_all, world)  # DDP would only cost time
    if sync_batchnorm:
        nn.SyncBatchNorm.convert_sync_batchnorm(step)
    unsent = left_out(step)
    broadcast(unsent.values(), world)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, list(unsent))
    wrapped = DistributedDataParallel(
        step,
        process_group=world.group,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=gradient_as_bucket_view,
        find_unused_parameters=find_unused_parameters,
    )
    if batchnorm == "average":
        wrapped.broadcast_buffers = False  # after DDP has sent rank 0's statistics to all
    if uses_all:
        prebuild_buckets(wrapped, world)
    parallel = Parallel(step, wrapped, uses_all, world)
    parallel.own_statistics = batchnorm == "average"
    parallel.exchange_by(comm_hook, powersgd_rank, start_step, average_every_steps)
    return parallel


def _share(wrapped: DistributedDataParallel, world: World) -> SharedGradients | None:
    model = wrapped.module
    dense = not has_sparse(model) and all(part.device.type == "cpu" for part in model.parameters())
    return SharedGradients.of(wrapped, world) if dense and world.is_on_one_host else None


def _one_bucket_at_a_time(hook: Callable[[Any, Any], Any], parallel: Parallel) -> Callable[[Any, Any], Any]:
    # Gloo pairs exchanges by the order in which ranks begin them. With two buckets under way, the second exchange of
    # one and the first exchange of the other would begin in any order.
    def run(state, bucket):  # DDP refuses annotations that are text
        gradients, began = hook(state, bucket), time.perf_counter()
        gradients.wait()
        parallel.hook_s += time.perf_counter() - began
        return gradients

    return run


def _ranks_per_host(world: World) -> int:
    every = set(world.gather_objects(world.local_size))
    if len(every) > 1:
        raise ConfigError(f"comm_hook=post_local_sgd needs equally many ranks on each host, not {sorted(every)}")
    return world.local_size


def dp(step: TrainStep, world: World = ALONE) -> Parallel:
    """Wrap the model of a step in DataParallel: one rank splits each batch among all GPUs that it sees.

    Raises:
        ConfigError: there are several ranks, or the task trains parts of the model, which it calls by their names.
    """
    _refuse_several_ranks("dp", world)
    if step.update:
        raise ConfigError(f"parallel=dp trains a whole model, and the task its part {step.update}: give parallel=ddp")
    step.wrap(DataParallel)
    return Parallel(step, step, world=world)


def none(step: TrainStep, world: World = ALONE) -> Parallel:
    """Train on one rank, without a wrapper.

    Raises:
        ConfigError: there are several ranks.
    """
    _refuse_several_ranks("none", world)
    return Parallel(step, step, world=world)


def _refuse_several_ranks(name: str, world: World) -> None:
    if world.size > 1:
        raise ConfigError(f"parallel={name} is for one rank, but this job has {world.size}: give dispatch.ranks=1")
