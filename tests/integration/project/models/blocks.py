"""A model of blocks, for runs whose model is sharded."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hydra import results
from ddp_hydra.tasks import Classification, Step


class Block(nn.Module):
    """Adds what two layers make.

    Args:
        width: of input and output.
        dropout: 0..1.
        over_batch: normalise by the batch, not each sample by itself.
    """

    def __init__(self, width: int, dropout: float, over_batch: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if over_batch else nn.LayerNorm(width)
        self.one, self.two = nn.Linear(width, 20), nn.Linear(20, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.two(self.dropout(self.one(self.norm(x)).tanh()))


class Blocks(nn.Module):
    """Layers before and after three blocks.

    Args:
        num_classes: what comes out.
        dropout: in each block.
        over_batch: of each block.
        tied: the first block has the weight of the third.
        tell: send a text record with the samples of each training batch.
        backend: of torch.compile in this process; None: torch's default.
    """

    def __init__(
        self,
        num_classes: int,
        dropout: float = 0.0,
        over_batch: bool = True,
        tied: bool = False,
        tell: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.tell = tell
        if backend is not None:
            torch.compile = partial(torch.compile, backend=backend)
        self.stem, self.head = nn.Linear(6, 10), nn.Linear(10, num_classes)
        self.blocks = nn.ModuleList(Block(10, dropout, over_batch) for _ in range(3))
        if tied:
            self.blocks[0].one.weight = self.blocks[2].one.weight

    def forward(self, x: Tensor) -> Tensor:
        """Predict the class of each point."""
        if self.tell and self.training:
            results.text("samples", json.dumps((x[:, 0] * 1024).int().tolist()))
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Odd(Blocks):
    """Does what a model that is sharded can't do.

    Args:
        odd: "scalar": multiply the output by a parameter without an axis; "mask": add a buffer to the head's input;
            "looks": use a block's parameter outside of it; "double": compute the head in double precision; "few":
            multiply by a parameter of two elements, of which some ranks have none; "one": by one of one element;
            "hook": double a gradient; "list": keep a parameter in a list; "renamed": save the head under another name.
        options: of Blocks.
    """

    def __init__(self, odd: str, **options: Any) -> None:
        super().__init__(**options)
        shape = {"scalar": (), "few": (2,), "one": (1,)}.get(odd)
        self.odd, self.scale = odd, 1.0 if shape is None else nn.Parameter(torch.ones(shape))
        self.register_buffer("mask", torch.zeros(10))
        if odd == "hook":
            self.stem.bias.register_hook(lambda gradient: 2 * gradient)
        if odd == "double":
            self.head.double()
        if odd == "renamed":
            self.register_state_dict_post_hook(lambda _, state, *__: _rename(state, "head.weight", "old.weight"))
            self.register_load_state_dict_pre_hook(lambda _, state, *__: _rename(state, "old.weight", "head.weight"))
        self.own, self.same = [nn.Parameter(torch.ones(2))] if odd == "list" else [], [self.stem, *self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        """Predict the class of each point."""
        x = nn.Sequential(self.stem, *self.blocks)(x)
        if self.odd == "looks":
            x = x + self.blocks[0].one.bias.mean()
        x = x + self.mask if self.odd == "mask" else x
        scale = self.scale.mean() if self.odd == "few" else self.scale
        return self.head(x.double() if self.odd == "double" else x) * scale


def _rename(state: dict[str, Any], name: str, other: str) -> None:
    state[other] = state.pop(name)


def over_width(model: Blocks, mesh: Any) -> None:
    """Share the width of each block among the ranks, in place of its parameters: tensor parallelism."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"one": ColwiseParallel(input_layouts=Shard(0)), "two": RowwiseParallel(output_layouts=Shard(0))}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


class HeadAlone(Classification):
    """Calls a part of the model."""

    def step(self, model: Any, batch: Any) -> Step:
        """Return the head's loss."""
        return Step(model.head(batch[0].repeat(1, 2)[:, :10]).square().mean())


class Packed(torch.Tensor):
    """Keeps its numbers in a tensor of another type, as moments of torchao's optimizers do."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Packed:
        return cls(parts["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class LowMoments(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = Packed(torch.zeros(3, dtype=torch.uint8))
        return super().step(closure)


class Nested(torch.optim.Optimizer):
    """Keeps moments in a dict, a list and a tuple, and a counter with the shape of a parameter of one element.

    Sums are the same tensors for all parameters.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sums = {"all": torch.zeros(()), "in_axes": torch.zeros(2, 3, dtype=torch.float64)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Follow the mean of the last gradients."""
        for group in self.param_groups:
            for one in group["params"]:
                if not (kept := self.state[one]):
                    kept |= {"n": torch.zeros(1), "more": {"mean": torch.zeros_like(one)}}
                    kept |= {"last": [torch.zeros_like(one) for _ in range(2)], "pair": (torch.zeros_like(one), 1)}
                    kept |= self.sums
                kept["n"] += 1
                kept["all"] += 0.01
                kept["in_axes"] += 0.01
                kept["more"]["mean"].lerp_(one.grad, 0.1)
                kept["pair"][0].lerp_(one.grad, 0.3)
                kept["last"] = [kept["last"][1], one.grad.clone()]
                mean = kept["more"]["mean"] / (1 - 0.9 ** kept["n"].item())
                rate = group["lr"] / (1 + kept["all"].item() + kept["in_axes"][1, 2].item())
                one -= rate * (mean + kept["pair"][0] + kept["last"][0])


class Mixing(Nested):
    """Adds a share of a gradient to a tensor that is none."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Add all gradients."""
        for group in self.param_groups:
            for one in group["params"]:
                self.sums["all"].add_(one.grad.sum())


class Centres(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(4))

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the distance of the logits."""
        return (logits - self.centres).square().mean() + 0 * y.sum()


class FirstHalf(Classification):
    """Counts what the first rank has."""

    def step(self, model: Any, batch: Any) -> Step:
        """Return a loss over nothing on other ranks."""
        step = super().step(model, batch)
        return step if dist.get_rank() == 0 else step._replace(loss=step.loss * 0, n=0, sums={})


class InTurn(Classification):
    """Trains the blocks, then the head, each by an optimizer of its own."""

    def updates(self, step: int) -> tuple[str, ...]:
        """Return both parts."""
        return ("blocks", "head")

    def step(self, model: Any, batch: Any, update: str = "") -> Step:
        """Return the loss of a batch, whatever is trained."""
        return super().step(model, batch)
