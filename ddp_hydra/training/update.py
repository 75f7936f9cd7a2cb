"""Turns losses into new weights: the updates of a step. Most tasks have one, of the whole model.

Losses are weighed: the gradient of a step is the gradient of the mean over the things of all micro-batches and ranks. A
micro-batch's loss is a mean over `n` things, of which only this rank knows. Gradients are averaged over the ranks. So
each loss is multiplied by n / N, where all ranks know N, and the averaged gradients by ranks · N / Σ n. Where n is the
number of samples, the latter is 1 and the former the share of the step's samples. Where a step has one rank and one
micro-batch, both are 1, so that hooks at gradients see those of the loss.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training.consensus import Decision, StepConsensus, things
from ddp_hydra.training.finite import GradientNorms, are_finite
from ddp_hydra.training.nonfinite import NonFiniteStep
from ddp_hydra.training.parallel import PartStep
from ddp_hydra.training.plain_state import begin_copy
from ddp_hydra.training.train_step import sparse_weights


@dataclass(eq=False)
class Update:
    """An update of a part of the model. It counts only if its loss and its gradients are finite on all ranks.

    Losses are checked before the gradients are averaged, and gradients after it, when all ranks have the same.

    Args:
        name: of the part; "" for the whole model.
        others: parameters that other updates train, and this one does not.
        late: check the gradients of a step together with the next step's loss. Then the loop need not wait for the
            backward pass of a GPU, but the weights have taken up the gradients by then.
        key: of the optimizer in the config.
        in_place: add gradients to memory that stays, as CUDA graphs write each micro-batch's to the same place.

    Attributes:
        gradients: norms of the last step's gradients; None if they are scaled.
        grad_norm: norm of the last step's gradients before clipping; None without clipping.
    """

    name: str
    part: PartStep
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    weighing: Weighing
    clip_norm: float | None = None
    others: Sequence[nn.Parameter] = ()
    late: bool = False
    in_place: bool = False
    key: str = "optimizer"

    def __post_init__(self) -> None:
        self.consensus = self.weighing.consensus
        self.trained = self.part.trained(self.optimizer)
        self.unchecked: GradientNorms | None = None
        self.gradients: GradientNorms | None = None
        self.is_unscaled = False
        self.lr: float | None = None
        self.grad_norm: Tensor | float | None = None
        # The schedule moves on when a step is skipped. If that is the first step, torch would warn of a mistake.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    @property
    def may_draw(self) -> bool:
        # Random numbers. Torch's own optimizers don't, but hooks of their step may.
        one = self.optimizer
        return not is_of_torch(one) or bool(one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks)

    @contextmanager
    def others_frozen(self) -> Iterator[None]:
        trained = [parameter for parameter in self.others if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_()

    def begin(self) -> None:
        self.weighing.begin()
        rate = self.optimizer.param_groups[0].get("lr")
        self.lr = None if rate is None else float(rate)  # an optimizer may find its rate itself
        self.is_unscaled = False
        self.optimizer.zero_grad(set_to_none=not self.in_place)
        if self.in_place:
            self.part.zero_gradients(self.trained)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def vote(self, losses: Sequence[Tensor], stop: int, log: bool = False) -> Callable[[], Decision]:
        # A collective.
        good, n = are_finite(losses, self.unchecked), self.weighing.n
        changed = self.part.buffers.have_changed()
        send_along = None
        if self.part.send_along is not None:
            factor_of = lambda votes: self.weighing.factor(things(votes))  # noqa: E731
            send_along = partial(self.part.send_along, factor_of=factor_of)
        if not isinstance(n, Tensor):
            return self.consensus.vote(good, stop, log, send_along, n, changed)
        arrived = begin_copy(n)
        return self.consensus.vote(good, stop, log, send_along, lambda: float(arrived()), changed)

    def find_nonfinite(
        self, decision: Decision, losses: Sequence[Tensor], at_once: bool = False
    ) -> NonFiniteStep | None:
        # Called after the backward pass. It is a collective where the ranks' gradients differ.
        before, self.unchecked = self.unchecked, None
        self.part.buffers.are_due &= decision.changed
        loss = self.weighing.unweighed(losses)
        if before is not None and (names := before.nonfinite_names()):
            return NonFiniteStep(0, before.loss(), names, steps_ago=1)
        if decision.bad_rank is not None:
            return NonFiniteStep(decision.bad_rank, loss())
        if self.part.needs_even:
            self.weighing.refuse_uneven(decision.n, self.part.needs_even)
        factor = self.weighing.factor(decision.n)
        if not self.part.is_weighed:
            self.rescale(factor)
        self.gradients = None if self.scaler.is_enabled() else self.part.norms(self.trained, loss)
        if self.gradients is None:
            return None
        if self.late and not at_once:
            self.unchecked = self.gradients
            return None
        names = self.gradients.nonfinite_names()
        bad_rank = 0 if names else None
        if not self.part.same_gradients:
            bad_rank = self.consensus.decide(good=not names).bad_rank
        return None if bad_rank is None else NonFiniteStep(bad_rank, self.gradients.loss(), names)

    def rescale(self, factor: float) -> None:
        if factor == 1:
            return
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
            self.is_unscaled = True
        self.part.rescale(self.trained, factor)

    def apply(self) -> None:
        if self.clip_norm is not None:
            if self.gradients is None and not self.is_unscaled:
                self.scaler.unscale_(self.optimizer)
            self.grad_norm = self.part.clip(self.trained, self.clip_norm, self.gradients)
        with step_explained(self.optimizer, self.key), self.part.explain_step_errors(self.optimizer):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.part.after_step()

    def go_on_from(self, metrics: Mapping[str, float]) -> None:
        # Of its last step: not every step of the run may be one of this update.
        prefix = f"{self.name}/" if self.name else ""
        self.lr = metrics.get(f"{prefix}lr")
        self.grad_norm = None if self.clip_norm is None else metrics.get(f"{prefix}grad_norm")

    def metrics(self) -> dict[str, float]:
        prefix = f"{self.name}/" if self.name else ""
        found = {} if self.lr is None else {f"{prefix}lr": self.lr}
        if self.grad_norm is not None:
            found[f"{prefix}grad_norm"] = float(self.grad_norm)
        if self.scaler.is_enabled():
            found[f"{prefix}loss_scale"] = float(self.scaler.get_scale())
        return found


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


@contextmanager
def step_explained(optimizer: torch.optim.Optimizer, key: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if isinstance(error, AssertionError) and "closure" in str(error):
            what = f"the step() of {type(optimizer).__name__} needs a closure, and gets none"
            raise ConfigError(f"{key}: {what}: give optimizer=adamw or sgd") from error
        if re.search(r"create_graph|does not have a grad_fn", str(error)):
            raise ConfigError(
                f"{key}: the step() of {type(optimizer).__name__} needs gradients of loss.backward(create_graph=True), "
                "which are not computed: give optimizer=adamw or sgd"
            ) from error
        if not re.search(r"sparse gradient|dense gradient|add\(sparse", str(error)):
            raise
        name, off = type(optimizer).__name__, {"fused": "false", "weight_decay": "0"}
        given = [one for one in off if any(group.get(one) for group in optimizer.param_groups)]
        takes_none = "takes no sparse gradients, and nn.Embedding(sparse=True) gives such"
        instead = "optimizer=sgd optimizer.fused=false optimizer.weight_decay=0"
        if name == "SparseAdam":
            said = "SparseAdam takes no dense gradients, and some parameters have such"
        elif name in ("SGD", "Adagrad") and given:
            said = f"{name} with {' and '.join(given)} {takes_none}"
            instead = " ".join(f"{key}.{one}={off[one]}" for one in given)
        else:
            said = f"{name} {takes_none}"
            if name.startswith("Adam"):
                said += " (torch's SparseAdam is for models whose gradients are all sparse)"
        raise ConfigError(f"{key}: {said}: give {instead}, or build the embedding with sparse=False") from error


def check_sparse(part: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> None:
    # A step of an optimizer of the same kind tells it before the data are read.
    sparse, kind = sparse_weights(part), cast("Any", type(optimizer))
    for group in optimizer.param_groups if is_of_torch(optimizer) else ():
        found = next((one for one in group["params"] if one in sparse), None)
        if found is not None:
            small = nn.Parameter(torch.zeros(2, 2, dtype=found.dtype, device=found.device))
            small.grad = torch.eye(2, dtype=found.dtype, device=found.device).to_sparse(1)
            with step_explained(optimizer, key):
                kind([{**group, "params": [small]}]).step()


def check_updates(task: Task, step: int, names: Sequence[str], known: Iterable[str] | None = None) -> None:
    if not names or (known is not None and not set(names) <= set(known)):
        raise ConfigError(
            f"{type(task).__name__}.updates({step}) returned {tuple(names)}: each step has to update something"
            + (f", one of {', '.join(known)}" if known is not None else "")
        )


class Weighing:
    """Weighs the losses of an update.

    Args:
        samples: of a step, on each rank.

    Attributes:
        scale: things for each sample in N, as in the first micro-batches of all ranks; None before these. Another
            number gives the same gradients but for rounding, so it is in checkpoints.
        n: things of this rank in the step so far; on the device where they depend on the data there.
        is_empty: nothing counted in the step, on any rank.
        is_whole: the step has one micro-batch of one rank, whose loss is the step's.
    """

    def __init__(self, samples: int, consensus: StepConsensus) -> None:
        self.samples, self.consensus = samples, consensus
        self.scale: float | None = None
        self.begin()

    def begin(self) -> None:
        self.n: float | Tensor = 0.0
        self.summed = self.is_empty = self.is_whole = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]

    def weigh(self, step: Step, size: int, is_only: bool = False) -> Tensor:
        # At the first one a collective.
        n = size if step.n is None else step.n
        self.n = self.n + n
        self.summed, self.is_whole = step.summed, is_only and self.consensus.world.size == 1
        if self.scale is None:
            self._agree(n, size)
        if step.summed:
            return step.loss
        if isinstance(n, Tensor):
            n = n.detach().double()
            _stop_gradient_where_zero(step.prediction, n)
        elif not n:
            return step.loss  # 0, see `TrainStep`
        weight = 1.0 if self.is_whole else n / self.denominator
        return step.loss if not isinstance(weight, Tensor) and weight == 1 else step.loss * weight

    @property
    def denominator(self) -> float:
        return self.samples * (self.scale or 1.0)

    def unweighed(self, losses: Sequence[Tensor]) -> Callable[[], float]:
        n, denominator = self.n, 0.0 if self.summed or self.is_whole else self.denominator

        def mean() -> float:
            total, things = float(sum(losses)), float(n)
            return total * denominator / things if things and denominator else total

        return mean

    def _agree(self, n: float | Tensor, size: int) -> None:
        of_ranks = self.consensus.world.gather_objects((float(n), float(size)))
        things, samples = (math.fsum(column) for column in zip(*of_ranks, strict=True))
        if things > 0 and math.isfinite(things):
            self.scale = things / samples

    def factor(self, n: Sequence[float]) -> float:
        if self.summed:
            return float(self.consensus.world.size)
        if not n:
            return 1.0
        total = math.fsum(n)
        if not (math.isfinite(total) and min(n) >= 0):
            raise ValueError(f"the task's n is {', '.join(map(str, n))} on the ranks: it must be 0 or more")
        self.is_empty = total == 0
        return 1.0 if self.is_empty or self.is_whole else len(n) * self.denominator / total

    def refuse_uneven(self, n: Sequence[float], hook: str) -> None:
        if not self.summed and (len(set(n)) > 1 or self.factor(n) != 1):
            things = ", ".join(f"{one:g}" for one in n)
            raise ConfigError(
                f"parallel.comm_hook={hook} is for losses whose mean is over the same number of things in each step "
                f"and on each rank, but this step's are over {things}: give parallel.comm_hook=auto, fp16 or bf16"
            )


def _stop_gradient_where_zero(prediction: Any, n: Tensor) -> None:
    if isinstance(prediction, Tensor) and prediction.requires_grad:
        prediction.register_hook(lambda gradient: gradient.where(n > 0, 0.0))
