"""Tells what a model costs before it is trained: bytes on each rank, and operations of a step. Nothing is computed."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ddp_hydra import results
from ddp_hydra.console.text import size_text
from ddp_hydra.data.batch import mapped, tensors
from ddp_hydra.data.draws import StateGuard
from ddp_hydra.errors import DdpHydraError
from ddp_hydra.tasks import Task
from ddp_hydra.training import builders
from ddp_hydra.training.optimizers import has_eval_weights, optimizer
from ddp_hydra.training.parallel import parameter_groups, units, weights
from ddp_hydra.training.train_step import modules_of
from ddp_hydra.training.update import is_of_torch

MOST_RANKS = 4096
"""Ranks up to which a number is sought that a model fits on."""


@dataclass
class Memory:
    """Bytes of a rank.

    Args:
        weights: with their average.
        gradients: of trained parameters.
        optimizer: moments of torch's optimizers.
        gathered: parts of a sharded model that are whole while they compute.
        activations: what the forward pass keeps for the backward pass; None: not known.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    activations: float | None = None

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered + (self.activations or 0.0)

    def over(self, ranks: float, gathered: float) -> Memory:
        weights, gradients, optimizer = (one / ranks for one in (self.weights, self.gradients, self.optimizer))
        return Memory(weights, gradients, optimizer, gathered, self.activations)

    def __str__(self) -> str:
        told = ", ".join(f"{name} {size_text(int(value))}" for name, value in vars(self).items() if value)
        unknown = ", and activations" if self.activations is None else ""
        return f"{size_text(int(self.total))} a rank{unknown}: {told}"


@dataclass
class Pass:
    """Bytes that a forward pass keeps for the backward pass, None if not known, and its floating-point operations.

    `parts` are the operations of each direct child of the model, by its name.
    """

    activations: int | None
    flops: int
    parts: dict[str, int]


def moments(optimizer: Optimizer) -> int:
    # Bytes on all ranks together; 0 for optimizers of other libraries.
    known = optimizer.defaults if is_of_torch(optimizer) else {}
    number = len(known.get("betas", ())) or bool(known.get("momentum"))
    return number * sum(one.nbytes for group in optimizer.param_groups for one in group["params"])


def build_outline(cfg: DictConfig, data: Any) -> nn.Module:
    # Without memory, or, if the model needs values, without memory for its parameters.
    make = partial(builders.model, cfg, data)
    with StateGuard():
        try:
            with torch.device("meta"):
                model = make()
        except Exception:
            model = weights.built_on_meta(make)
    parameter_groups.freeze(model, cfg.trainer.freeze)
    return model


def memory_of(cfg: DictConfig, model: nn.Module, optimizers: Iterable[Optimizer]) -> Memory:
    # Of a rank that has all of the model, without activations.
    parameters = list(model.parameters())
    whole, trained = (sum(one.nbytes for one in parameters if one.requires_grad or every) for every in (True, False))
    given = list(optimizers)
    is_averaged = cfg.trainer.ema_decay or any(map(has_eval_weights, given))
    return Memory(whole * (2 if is_averaged else 1), trained, sum(map(moments, given)))


def outlined_optimizers(cfg: DictConfig, model: nn.Module, task: Task, updates: Sequence[str]) -> list[Optimizer]:
    cfg = copy.deepcopy(cfg)
    for node in (cfg.optimizer, *cfg.optimizer.values()):
        if isinstance(node, DictConfig):
            with open_dict(node):
                node.pop("fused", None)  # torch refuses it without memory
    try:
        return [optimizer(cfg, task.part(model, name) if name else model, update=name) for name in updates]
    except DdpHydraError:
        raise
    except Exception:  # one of the user that reads weights, which are not there
        return []


def gathered_bytes(cfg: DictConfig, model: nn.Module) -> int:
    # Whole at once are what is outside of units, and of the largest unit its weights, the ones gathered ahead, and
    # gradients.
    blocks, least = cfg.parallel.get("blocks"), cfg.parallel.get("min_params", units.MIN_PARAMS)
    gathered = [units.parameters_of(unit) for unit in units.units_of(model, blocks, least)]
    inside = set().union(*gathered)
    rest = sum(one.nbytes for one in model.parameters() if one not in inside)
    return rest + 3 * max((sum(one.nbytes for one in unit) for unit in gathered), default=rest)


def one_batch(loader: Any, size: int) -> Any:
    # With nothing in it that counts; None if there is no batch without a step.
    with StateGuard():
        sample = loader.spare()

    def grown(tensor: Tensor) -> Tensor:
        return tensor.new_empty((size, *tensor.shape[1:]), device="meta") if tensor.ndim else tensor

    return None if sample is None else mapped(grown, sample)


def fitting(whole: Memory, gathered: float, ranks: int, limit: float) -> str:
    while ranks <= MOST_RANKS and whole.over(ranks, gathered).total > limit:
        ranks *= 2
    free = f"{size_text(int(limit))} are there"
    if ranks > MOST_RANKS:
        return (
            f"{free}: too little with any number of ranks; give a smaller data.batch_size, trainer.precision=bf16 or "
            "trainer.activation_checkpointing"
        )
    return f"{free}: it fits with parallel=fsdp2 on {ranks}"


def forward_pass(model: nn.Module, task: Task, update: str, batch: Any, cfg: DictConfig) -> Pass | None:
    # None if the model needs values, or a task of the user does. The model is one of `build_outline`. A step may keep
    # what it counts or computes in the task: it gets a copy of it, whose tensors have no memory.
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    task, fake = copy.copy(task), FakeTensorMode(allow_non_fake_inputs=True)
    if getattr(task, "mix", None) is not None:
        task.__dict__["mix"] = None  # it draws a value, and its operations are few
    holders = [task, *(one for module in modules_of(task) for one in module.modules())]
    held = [one for holder in holders for one in vars(holder).values() if isinstance(one, torch.Generator)]
    copies = {id(one): copy.deepcopy(one) for one in held}  # FakeCopyMode can't
    try:
        with StateGuard(), FakeCopyMode(fake):
            task = copy.deepcopy(task, copies)
    except Exception:  # a lock, an open file
        return None
    step, counter, kept = _Step(task, model.train(), update), FlopCounterMode(display=False), _Kept()
    done: list[Any] = []
    noted = model.register_forward_hook(lambda *_: done.append(None))
    activations: int | None = None
    try:
        with (
            parameter_groups.evaluation_mode(modules_of(task)),
            noted,
            fake,
            StateGuard(),
            warnings.catch_warnings(action="ignore"),
        ):
            named = [*step.named_parameters(), *step.named_buffers()]
            fakes = {name: torch.empty_like(one, device="cpu") for name, one in named}
            for name, one in named:
                fakes[name].requires_grad_(one.requires_grad)
            given = mapped(lambda tensor: torch.empty_like(tensor, device="cpu"), batch)
            kept.leave_out([*fakes.values(), *tensors(given)])
            autocast = builders.autocast(cfg, torch.device("cpu"))
            with kept.watched(model, cfg.trainer.activation_checkpointing), counter, autocast:
                torch.func.functional_call(step, fakes, (given,))
        activations = kept.n_bytes
    except Exception:  # model and task may do anything with values, which are not there
        if not done or not type(task).__module__.startswith("ddp_hydra."):  # it may go on to another pass
            return None
    finally:
        results.take_means()  # what model and task have logged has no value
    of_modules = counter.get_flop_counts()  # by the names of modules within `step`
    parts = {name: sum(of_modules.get(f"_Step.model.{name}", {}).values()) for name, _ in model.named_children()}
    return Pass(activations, counter.get_total_flops(), parts)


@dataclass
class Operations:
    """Floating-point operations of training.

    Args:
        parameters: of a transformer, without embeddings that only look up: 6 operations for each and a token; 0: it is
            none.
        attention: 12 times its layers, heads and size of a head: operations for a token and each token before it.
        sample: of others, for a sample.
    """

    parameters: float = 0.0
    attention: float = 0.0
    sample: float = 0.0

    def per_s(self, samples_per_s: float, tokens_per_s: float) -> float:
        if not self.parameters or not tokens_per_s:
            return self.sample * samples_per_s
        return tokens_per_s * (6 * self.parameters + self.attention * tokens_per_s / samples_per_s)


def operations_of(model: nn.Module) -> Operations | None:
    # Torchtitan's count for a transformer whose `config` has its sizes; None for others. The backward pass takes as
    # much again for the weights as for the inputs, so frozen parameters count for two thirds.
    config = getattr(model, "config", None)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes: list[Any] = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, heads, width = sizes
    uses = Counter(one for _, one in model.named_parameters(remove_duplicate=False))
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    counted = (one for one in uses if one not in tables or uses[one] > 1)
    parameters = sum(one.numel() * (1 if one.requires_grad else 2 / 3) for one in counted)
    return Operations(parameters, 12 * layers * heads * (getattr(config, "head_dim", None) or width // heads))


class _Step(nn.Module):
    """Calls a task, whose loss is no part of it."""

    def __init__(self, task: Task, model: nn.Module, update: str) -> None:
        super().__init__()
        self.model, self.task, self.options = model, task, {"update": update} if update else {}

    def forward(self, batch: Any) -> Any:
        return self.task.step(self.model, batch, **self.options)


class _Kept:
    """Adds up the tensors that autograd keeps.

    Of modules that are computed again, these are their inputs, and once as much as the largest of them keeps.
    """

    def __init__(self) -> None:
        self.known: set[StorageWeakRef] = set()
        self.stack: list[dict[StorageWeakRef, Tensor]] = [{}]  # tensors, so that no storage ends
        self.largest = 0

    @property
    def n_bytes(self) -> int:
        return self._size() + self.largest

    def _size(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.stack[-1].values())

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        self.known |= {StorageWeakRef(one.untyped_storage()) for one in tensors}
        self.left_out = tensors

    def add(self, tensor: Tensor) -> Tensor:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in self.known:
            self.stack[-1][storage] = tensor
        return tensor

    @contextmanager
    def watched(self, model: nn.Module, again: Sequence[str]) -> Iterator[None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            for tensor in tensors(inputs):
                self.add(tensor)
            self.stack.append({})

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.largest = max(self.largest, self._size())
            self.stack.pop()

        with ExitStack() as stack:
            for module in model.modules():
                if type(module).__name__ in again:
                    stack.enter_context(module.register_forward_pre_hook(enter))
                    stack.enter_context(module.register_forward_hook(leave))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor))
            yield
