"""The model of a run among its ranks. `parallel=ddp`, `fsdp2`, `dp`, `none`: one file each, which nobody else knows.

weights          what is done with each parameter and buffer of a model; the moving average
parameter_groups which parameters train, decay, and are computed twice
sent_buffers     buffers that ranks take from rank 0 after a step that changed one
shared_memory    averages gradients of ranks on one host, for ddp
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Task
from ddp_hydra.training import plain_state
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.finite import GradientNorms, is_finite
from ddp_hydra.training.parallel import parameter_groups, weights
from ddp_hydra.training.parallel.sent_buffers import SentBuffers
from ddp_hydra.training.parallel.units import BY_BLOCK, blocks_of, compile_each, torch_mode
from ddp_hydra.training.parallel.weights import Ema
from ddp_hydra.training.train_step import TrainStep, modules_of

OF_LOSS = "loss: "
"""Begins the names of a loss's parameters in the optimizer's state. No name of a model's has a colon."""
Named = Sequence[tuple[str, nn.Parameter]]
Load = Callable[[nn.Module, World], list[str]]
"""Fills a model with weights of a file that rank 0 has, and returns the names that the file lacks. A collective."""


class Parallel:
    """Owns the model of a run: builds it, wraps what trains it, and is asked for all that walks its parameters.

    Its order: build, weights, freeze, activation checkpointing (`build`); then, once for each update, wrap and compile
    (`build_part`). A kind of its own overrides `wrap` for steps that replicate the model. Where a rank does not have
    the whole model, it also overrides `build`, `build_average`, and what turns the state into shares and back.

    Attributes:
        model: not wrapped.
        channels_last: its convolutions have the channels last.
        parts: the steps that train it, by the name of the update.
    """

    model: nn.Module
    shards = False
    """Ranks have shares of the model's tensors, where they have a group."""
    blocks: Sequence[str] | None = None
    """Classes of modules that `trainer.compile=block` compiles; None: what the model repeats."""
    one_rank_name = ""
    """Name in the config of a kind for one rank; "": it takes several."""

    def __init__(self, world: World = ALONE) -> None:
        if self.one_rank_name and world.size > 1:
            raise ConfigError(
                f"parallel={self.one_rank_name} is for one rank, but this job has {world.size}: give dispatch.ranks=1"
            )
        self.world, self.channels_last = world, False
        self.parts: dict[str, PartStep] = {}

    @property
    def is_sharded(self) -> bool:
        return self.shards and self.world.group is not None

    @property
    def share(self) -> int:
        # Number of this rank's share of the parameters. Ranks with the same one update them alike.
        return 0

    @property
    def casts_to_bf16(self) -> bool:
        # The model computes in the run's precision by itself, without autocast.
        return False

    def adopt(self, model: nn.Module) -> Parallel:
        self.model, self.model_name = model, type(model).__name__
        self.at_first = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        return self

    # -- from building to the optimizer ------------------------------------------------------------------------

    def build(
        self,
        trainer: DictConfig,
        make: Callable[[], nn.Module],
        device: torch.device,
        load: Load | None = None,
        saved: Collection[str] = (),
        is_trained: bool = True,
    ) -> list[str]:
        # A collective. It returns what the weights to load had no value for. `saved`: names that have a value in the
        # state that will be loaded afterwards.
        model = make()
        if is_trained:
            weights.check_own_state(model)
        model = model.to(device)
        weights.read_rows(model)
        untouched = load(model, self.world) if load is not None else []
        self.channels_last = weights.lay_out(model, trainer.channels_last)
        if is_trained:
            parameter_groups.freeze(model, trainer.freeze)
            parameter_groups.activation_checkpointing(model, trainer.activation_checkpointing)
        self.adopt(model)
        return untouched

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        # Says what to do about an error in the model that this kind is the reason for.
        try:
            yield
        except RuntimeError as error:
            of_view = "view size is not compatible|Cannot view a tensor|must have a last dimension with stride 1"
            if self.channels_last and re.search(of_view, str(error)):
                error.add_note(
                    "the channels of images and of convolutions are last in memory: give trainer.channels_last=false, "
                    "or write flatten or reshape in place of view, and x.contiguous() in view_as_complex"
                )
            raise

    def rebind(self, world: World) -> None:
        # The model goes on in another world, and trains what it trained when it was built.
        self.world = world
        while self.parts:
            self.parts.popitem()[1].release()
        gc.collect()  # DDP's hooks at the gradients end with it
        for parameter, is_trained in self.at_first:
            parameter.requires_grad_(is_trained)
            parameter.grad = None

    def build_part(self, trainer: DictConfig, task: Task, update: str) -> PartStep:
        # A collective.
        if update in self.parts:
            self.parts.pop(update).release()
        part = self.parts[update] = self.wrap(step := TrainStep(task, self.model, update))
        if trainer.compile is not None:
            self.compile(step, update, trainer.compile)
        return part

    def compile(self, step: TrainStep, update: str, mode: str) -> None:
        # As DDP calls this step, torch.compile cuts the graph at DDP's buckets.
        if mode == BY_BLOCK and (blocks := blocks_of(self.model, self.blocks)):
            compile_each(blocks, mode)
        elif update:
            compile_each([step.part], mode)  # the task finds it in the model, not in a wrapper
        else:
            step.wrap(partial(torch.compile, mode=torch_mode(mode)))

    def wrap(self, step: TrainStep) -> PartStep:
        return PartStep(step, world=self.world)

    def many_passes(self) -> AbstractContextManager[None]:
        # For forward passes without gradients that follow one another: nothing reads the parameters in between.
        return nullcontext()

    def broadcast_rest(self, task: Task) -> None:
        # A collective. Wrappers send what a step trains; other parts of the model, and the task's own models, begin
        # alike.
        sent = {id(one) for part in self.parts.values() for one in part.tensors_sent()}
        others = (
            one
            for module in (self.model, *modules_of(task))
            for one in weights.tensors_of(module)
            if id(one) not in sent
        )
        weights.broadcast(others, self.world)

    # -- what walks the model ----------------------------------------------------------------------------------

    def names(self, loss: nn.Module | None = None) -> dict[nn.Parameter, str]:
        return weights.names(self.model, loss, OF_LOSS)

    def nonfinite_names(self) -> list[str]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if not is_finite(parameter)]

    def buffer_names(self) -> list[str]:
        return [name for name, _ in self.model.named_buffers(remove_duplicate=False)]

    def unchecked_names(self, trained: Collection[nn.Parameter], loss: nn.Module | None = None) -> list[str]:
        # Names of buffers, and of frozen parameters: one may be a mask. Several updates freeze what the others train.
        named = self.buffer_names()
        parameters = self.model.named_parameters(remove_duplicate=False)
        named += [name for name, one in parameters if not (one.requires_grad or one in trained)]
        if loss is not None:
            named += [f"loss.{name}" for name, _ in loss.named_buffers(remove_duplicate=False)]
        return named

    def fingerprint(self) -> tuple[int, list[bool]]:
        # Numbers that change with weights and buffers, and what is trained.
        versions = sum(weights.local(tensor)._version for tensor in weights.tensors_of(self.model))
        return versions, [parameter.requires_grad for parameter in self.model.parameters()]

    def build_average(self, decay: float) -> Ema:
        return Ema(self.model, decay)

    def state(self) -> dict[str, Any]:
        return weights.state_of(self.model)

    def load(self, content: Mapping[str, Any]) -> None:
        weights.load_weights(self.model, content, self.shard_state)

    def copy_of(self, tensor: Tensor, name: str, whole: bool = False) -> Tensor:
        # A tensor of the state as a checkpoint holds it.
        return plain_state.plain_copy(tensor, name)

    def empty_shard(self, parameter: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        # Memory for what this rank keeps of a tensor of the state: of a parameter, or of its slots.
        return torch.empty(shape, dtype=dtype)

    def read_targets(self, loss: nn.Module | None = None) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
        # The same by names of tensors in a state.
        own, trained = self.state(), {name: parameter for parameter, name in self.names(loss).items()}

        def like(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            kind, _, rest = name.partition(".model." if name.startswith("ema.") else ".")
            if kind == "optimizer":
                slot = rest.partition("state.")[2]
                while slot and slot not in trained:  # a slot may be a dict or a list of tensors
                    slot = slot.rpartition(".")[0]
                parameter = trained.get(slot)
            else:
                parameter = own.get(rest)
            return self.empty_shard(parameter, shape, dtype)

        return like

    def shard_state(self, state: Any) -> Any:
        # What this rank keeps of a model's state, which may be whole.
        return state

    def shard_slots(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        # The same of an optimizer's state, by numbers of parameters.
        return state


class PartStep:
    """A training step among its ranks: called with a micro-batch, it returns what the task makes of it.

    Args:
        wrapped: the module that is called instead of the step; None: the step.
        uses_all: each step has to give all trained parameters a gradient.

    Attributes:
        part: what the step trains: the model, or a part of it.
        own: its parameters with their names, and the parameters of a loss that is trained with it.
        same_gradients: all ranks have the same gradients after the backward pass.
        needs_even: name of a communication hook that needs losses over the same number of things in each step; "".
        is_weighed: the gradients of the last backward pass have the factor of `send_along`.
        buffers: the ones that it sends itself; a wrapper may send others.
        is_last: the next micro-batch is the last one of its step.
        send_along: sends numbers with the gradients, see `SharedGradients`; None: they take an exchange of their own.
    """

    is_weighed, is_last = False, True
    send_along: Callable[..., Callable[[], Tensor]] | None = None

    def __init__(
        self, step: TrainStep, wrapped: nn.Module | None = None, uses_all: bool = False, world: World = ALONE
    ) -> None:
        self.step, self.world, self.part = step, world, step.part
        self.wrapped: nn.Module = step if wrapped is None else wrapped
        self.names = step.names()
        self.needed = [(name, one) for one, name in self.names.items() if uses_all and one.requires_grad]
        self.trained_when_built = self.are_trained()
        self.same_gradients, self.needs_even = True, ""
        self.buffers = SentBuffers(world)

    def __call__(self, batch: Any) -> Any:
        self.buffers.send()
        result = self.compute(batch)
        self.buffers.are_due = self.is_last  # until the vote on the step says that none has changed
        return result

    def compute(self, batch: Any) -> Any:
        return self.wrapped(batch)

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[Any]:
        self.is_last = enabled
        return all_used(self.needed) if enabled else nullcontext()

    @property
    def is_outdated(self) -> bool:
        # It expects gradients of other parameters than are trained now: it has to be built again.
        return self.world.size > 1 and self.are_trained() != self.trained_when_built

    def are_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.names]

    def tensors_sent(self) -> list[Tensor]:
        # All ranks have rank 0's at the first step.
        return weights.tensors_of(self.step)

    def release(self) -> None:
        self.wrapped = self.step

    # -- gradients of the parameters that an optimizer trains --------------------------------------------------

    def trained(self, optimizer: torch.optim.Optimizer) -> Named:
        return [(self.names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]]

    def gradients(self, trained: Named) -> list[tuple[str, Tensor]]:
        # What this rank has of them.
        return [(name, one.grad) for name, one in trained if one.grad is not None]

    def zero_gradients(self, trained: Named) -> None:
        # In memory that stays.
        for _, parameter in trained:
            if not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def norms(self, trained: Named, loss: Callable[[], float]) -> GradientNorms:
        return GradientNorms(self.gradients(trained), loss)

    @torch.no_grad()
    def rescale(self, trained: Named, factor: float) -> None:
        for _, gradient in self.gradients(trained):  # one by one: torch._foreach_mul_ rounds worse in bf16
            gradient.mul_(factor)

    def clip(self, trained: Named, max_norm: float, norms: GradientNorms | None) -> Tensor:
        # It returns the norm of all gradients together, as it was.
        if norms is None or norms.sparse:
            return nn.utils.clip_grad_norm_([parameter for _, parameter in trained], max_norm)
        norms.clip([gradient for _, gradient in self.gradients(trained)], max_norm)
        return norms.total_norm

    def explain_step_errors(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_step(self) -> None: ...

    def leave_out_step(self) -> None:
        # Later steps don't use what is left of its gradients. Each rank has put its own buffers back.
        self.buffers.are_due = True

    def synchronise(self, *averages: nn.Module) -> None:
        # A collective. It makes the model and averages of it the same on all ranks, before validation or a save.
        ...

    def held_s(self) -> float:
        # Seconds that the backward pass has waited in hooks, which DDP itself counts as part of it.
        return 0.0

    def exchange_s(self) -> float:
        # Seconds of the last step that torch has timed, after the backward pass; NaN where they are not known.
        return math.nan


@contextmanager
def all_used(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
    # DDP fails in the step after, and gives their numbers.
    yield
    unused = [name for name, parameter in parameters if parameter.grad is None and parameter.requires_grad]
    if unused:
        raise does_not_use(unused)


def does_not_use(names: Sequence[str], what: str = "this step's loss") -> ConfigError:
    return ConfigError(
        f"{what} does not depend on {shown(names, 6)}: if that is so in each step, leave it out of the model or freeze "
        "it by trainer.freeze; if in some steps, give parallel=ddp and parallel.find_unused_parameters=true"
    )
