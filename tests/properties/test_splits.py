"""Any split of the same samples gives the weights, losses and metrics of a plain loop of torch over whole batches.

So does `evaluate` of the last checkpoint. A split is a number of ranks, of micro-batches and of samples in each. A run
may stop anywhere and go on with another split, or lose a rank. Models have no batch statistics and no dropout; all is
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ddp_hydra

pytestmark = pytest.mark.integration

BATCH, STEPS = 12, 6
"""Samples of all ranks in a step; steps of a run: 40 samples are 3 steps an epoch, and 4 samples are left out."""
SPLITS = [
    (3, 2, 2),
    (2, 3, 2),
    (2, 1, 6),
    (1, 4, 3),
    (3, 4, 1),
    (3, 1, 4),
    (1, 3, 4),
    (2, 2, 3),
    (1, 1, 12),
    (1, 12, 1),
]
"""Ranks, micro-batches of each, samples of each of them."""
RATE, MOMENTUM, DECAY = 0.2, 0.9, 0.01
SGD = ("optimizer=sgd", f"optimizer.lr={RATE}", f"optimizer.momentum={MOMENTUM}", "optimizer.nesterov=false")
BARE = (*SGD, f"optimizer.weight_decay={DECAY}", "scheduler=none", "sampler=sequential", "model=exact", "data=exact")

Loss = Callable[[Any, Any, Any], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass
class Case:
    """A task, and the same by hand.

    Args:
        words: that choose task and loss.
        kind: of the data and the model.
        loss: (model, x, y) -> the loss of all samples together, and metrics.
        parts: of the model that are trained one after the other.
        criterion: class of a loss that is trained with the model, which `loss` is given as its last argument.
    """

    words: tuple[str, ...]
    kind: str
    loss: Loss
    parts: tuple[str, ...] = ("",)
    criterion: str = ""


def classes(**options: Any) -> Loss:
    def loss(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        scores, counts = model(x), y >= 0
        right = (scores.argmax(1) == y)[counts]
        return F.cross_entropy(scores, y, **options), {"accuracy": right.double().mean()}

    return loss


def numbers(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    error = model(x) - y
    r2 = 1 - error.square().sum(0) / (y - y.mean(0)).square().sum(0)
    return error.square().mean(), {"mae": error.abs().mean(), "r2": r2.mean()}


def several(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    return F.binary_cross_entropy_with_logits(model(x), y), {}


def pixels(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    scores, counts = model(x), y != 255
    guess = scores.argmax(1)
    both = [((guess == c) & (y == c)).sum().double() for c in range(scores.shape[1])]
    either = [(((guess == c) | (y == c)) & counts).sum() for c in range(scores.shape[1])]
    iou = torch.stack([one / other for one, other in zip(both, either, strict=True) if other]).mean()
    right = (guess == y)[counts].double().mean()
    return F.cross_entropy(scores, y, ignore_index=255), {"accuracy": right, "iou": iou}


def tokens(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    scores, counts = model(x), y > 0
    loss = F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=0)
    return loss, {"accuracy": (scores.argmax(-1) == y)[counts].double().mean(), "perplexity": loss.exp()}


def labels(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    return model(x, y)["loss"], {}


def own(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    scores, counts = model(x), y > 0
    even = (scores.argmax(-1) == y)[:, ::2][counts[:, ::2]].double().mean()
    return scores.square().mean(-1)[counts].mean(), {"even": even}


def plain(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    return (model(x) - F.one_hot(y, 3)).abs().sum(-1).mean(), {}


def two_parts(model: Any, x: Tensor, y: Tensor, update: str = "one") -> tuple[Tensor, Mapping[str, Tensor]]:
    losses = F.cross_entropy(model[update](x), y, reduction="none")
    return (losses if update == "one" else losses[y == 0]).mean(), {}


def trained_loss(model: Any, x: Tensor, y: Tensor, criterion: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    return criterion(model(x), y), {}


WEIGHTS = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
CASES = {
    "classification": Case(("task=classification",), "classes", classes()),
    "class weights": Case(("task=classification", "loss=weighted"), "classes", classes(weight=WEIGHTS)),
    "ignored": Case(("task=classification", "loss=torch"), "ignored", classes()),
    "sum": Case(
        ("task=classification", "loss=torch", "+loss.reduction=sum", "optimizer.lr=0.01"),
        "classes",
        classes(reduction="sum"),
    ),
    "several labels": Case(
        ("task=classification", "loss=several", "task.metric=loss", "task.direction=minimize"),
        "several",
        several,
    ),
    "trained loss": Case(
        ("task=classification", "loss=centres", "optimizer.lr=0.05"), "classes", trained_loss, criterion="Centres"
    ),
    "regression": Case(("task=regression",), "numbers", numbers),
    "segmentation": Case(("task=segmentation", "task.ignore=255"), "pixels", pixels),
    "language model": Case(("task=language_model", "task.ignore=0"), "tokens", tokens),
    "model's loss": Case(("task=model_loss",), "labels", labels),
    "user's with n": Case(("task=own",), "tokens", own),
    "user's plain": Case(("task=plain",), "classes", plain),
    "user's of two parts": Case(("task=parts", "model.kind=two parts"), "classes", two_parts, ("one", "other")),
}
QUICK = ("classification", "trained loss", "segmentation", "language model", "user's of two parts")
"""Of the others, test_losses.py holds to the gradients and losses, in one process."""


@dataclass
class ByHand:
    """What the loop by hand came to."""

    weights: dict[str, Tensor]
    train: float
    val: dict[str, float]


def loop(case: Case, module: Any, clip: float | None) -> ByHand:
    """Train in plain torch, with whole batches."""
    kind = case.kind if case.parts == ("",) else "two parts"
    model, data, held_out = module.exact(kind), module.Exact(case.kind, 40, 0), module.Exact(case.kind, 17, 1)
    rate = next((float(word.partition("=")[2]) for word in case.words if word.startswith("optimizer.lr=")), RATE)
    parts = {part: model.get_submodule(part) for part in case.parts}
    criterion = getattr(module, case.criterion)() if case.criterion else None
    more = list(criterion.parameters()) if criterion is not None else []
    optimizers = {
        part: torch.optim.SGD([*trained.parameters(), *more], rate, MOMENTUM, weight_decay=DECAY)
        for part, trained in parts.items()
    }
    sums: list[Tensor] = []
    epoch = len(data) // BATCH
    for step in range(STEPS):
        batch = slice(step % epoch * BATCH, (step % epoch + 1) * BATCH)
        sums = [] if step % epoch == 0 else sums
        for part, optimizer in optimizers.items():
            loss, _ = case.loss(model, data.x[batch], data.y[batch], *([part] if part else [criterion] if more else []))
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_([*parts[part].parameters(), *more], clip)
            optimizer.step()
            if part in ("", "one"):
                sums.append(loss.detach())
    with torch.no_grad():
        loss, metrics = case.loss(model, held_out.x, held_out.y, *([criterion] if more else []))
    weights = model.state_dict() | {
        f"loss.{name}": value for name, value in (criterion or nn.Module()).state_dict().items()
    }
    return ByHand(weights, float(sums[-1]), {"loss": float(loss)} | {k: float(v) for k, v in metrics.items()})


def ways(number: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draw how a case is split. The first example takes the first of each list, so each case has them in an order of
    its own."""

    def one_of(*choices: Any) -> st.SearchStrategy[Any]:
        begin = number % len(choices)
        return st.sampled_from([*choices[begin:], *choices[:begin]])

    return st.fixed_dictionaries(
        {
            "first": one_of(*SPLITS),
            "second": one_of(*SPLITS[number % 3 :], *SPLITS[: number % 3]),
            "stop": one_of(2, 4, 1, 3, 5),
            "kill": one_of(5, None, 4, 6),
            "workers": one_of(0, 0, 0, 2),
            "clip": one_of(0.3, None),
            "hook": one_of("auto", "none"),
        }
    )


@pytest.mark.parametrize(
    ("number", "case"),
    [
        pytest.param(number, case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for number, (name, case) in enumerate(CASES.items())
    ],
)
def test_any_split_of_the_same_samples_comes_to_what_plain_torch_does(number, case, run, by_hand):
    @settings(
        derandomize=True,
        phases=[Phase.generate],  # a smaller example would take minutes to find
        max_examples=max(1, settings().max_examples // 40),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
    )
    @given(how=ways(number))
    def check(how: Mapping[str, Any]) -> None:
        wanted = loop(case, by_hand, how["clip"])
        found = trained(case, run, how)
        for name, value in wanted.weights.items():
            assert torch.allclose(found["weights"][name], value, rtol=1e-9, atol=1e-9), (name, how)
        for name, value in wanted.val.items():
            assert math.isclose(found["metrics"][f"val/{name}"], value, rel_tol=1e-9, abs_tol=1e-9), (name, how)
        evaluated = ddp_hydra.Run(found["dir"]).evaluate("dispatch.ranks=3", "data.batch_size=2", which="last")
        for name, value in found["metrics"].items():
            if name.startswith("val/"):
                assert math.isclose(evaluated[name], value, rel_tol=1e-9, abs_tol=1e-9), (name, how)
        means, whole = found["epoch_means"]["last"], found["whole"]
        assert means.keys() == whole.keys() >= {"loss"} or len(case.parts) > 1
        for name, value in whole.items():  # of the last epoch, amid which most runs were resumed
            assert math.isclose(means[name], value, rel_tol=1e-9, abs_tol=1e-9), (name, how)

    check()


def trained(case: Case, run: Any, how: Mapping[str, Any]) -> dict[str, Any]:
    """Train with one split, and from some step on with another one."""
    kept = ("trainer.checkpoint_every_steps=1", "results.keep_checkpoints=null", "trainer.log_every_steps=1")
    clip = "null" if how["clip"] is None else how["clip"]
    kept = (*kept, f"parallel.comm_hook={how['hook']}")
    words = (*BARE, *case.words, f"data.kind={case.kind}", *kept, f"trainer.clip_norm={clip}", "trainer.epochs=2")
    first = run(*words, *split(how["first"]), f"data.workers={how['workers']}")
    folder = first.dir / "checkpoints"
    fault = [] if how["kill"] is None else [f"faults=['kill,rank=0,step={max(how['kill'], how['stop'] + 1)}']"]
    last = run(f"resume={folder}/step-{how['stop']:06d}.pt", *split(how["second"]), *fault)
    content = torch.load(last.dir / "checkpoints" / "last.pt", weights_only=True)
    assert content["position"]["step"] == STEPS
    whole = torch.load(folder / "last.pt", weights_only=True)["epoch_means"]["last"]
    weights = content["model"] | {f"loss.{name}": value for name, value in content.get("loss", {}).items()}
    return content | {"weights": weights, "metrics": last.summary["metrics"], "whole": whole, "dir": last.dir}


def split(how: tuple[int, int, int]) -> tuple[str, ...]:
    ranks, parts, size = how
    return (f"dispatch.ranks={ranks}", f"trainer.gradient_accumulation_steps={parts}", f"data.batch_size={size}")
