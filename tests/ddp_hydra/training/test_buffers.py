"""Buffers that torch's collectives can't send train, are validated and saved, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.tasks.classification import Classification
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.parallel import weights as buffers
from ddp_hydra.training.parallel.ddp import DDP
from ddp_hydra.training.parallel.weights import Ema
from ddp_hydra.training.train_step import TrainStep
from tests.ddp_hydra.training.loop_runs import flat

ODD = {
    "int16": lambda: torch.tensor([1, -300], dtype=torch.int16),
    "uint16": lambda: torch.tensor([1, 60000], dtype=torch.uint16),
    "float8": lambda: torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "one": lambda: torch.tensor(7, dtype=torch.int16),
    "turned": lambda: torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
    "none": lambda: torch.zeros(0, dtype=torch.int16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
}


class Odd(nn.Linear):
    """One layer with buffers of all these types, and frozen parameters of two."""

    def __init__(self, in_features: int = 4, out_features: int = 3) -> None:
        super().__init__(in_features, out_features)
        for name, make in ODD.items():
            self.register_buffer(name, make())
        self.table = nn.Parameter(ODD["int16"](), requires_grad=False)
        self.scale = nn.Parameter(ODD["float8"](), requires_grad=False)


MODEL = {"_target_": f"{__name__}.Odd"}


def test_they_train_and_are_saved_and_resumed(train):
    parts = {"model": MODEL}
    first = train(parts=parts, epochs=1, ema_decay=0.9)
    saved = read(first.last)["model"]
    assert saved["expanded"].equal(torch.ones(3, 4))
    assert saved["float8"].dtype == torch.float8_e4m3fn
    assert train(parts=parts, epochs=2, ema_decay=0.9, resume=first.last).last.exists()


@pytest.mark.parametrize("name", sorted(ODD))
def test_what_can_be_sent(name):
    assert not buffers.can_be_sent(ODD[name]())
    for kind in buffers.SENT:
        assert buffers.can_be_sent(torch.ones(2, 3, dtype=kind).T)
    assert not buffers.can_be_sent(torch.arange(21.0)[::10].expand(2, 3))


class Moving(nn.Module):
    """Gives its buffers other tensors in each forward pass, as many write a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.inner = nn.Module()
        self.inner.register_buffer("mean", self.mean)
        self.inner.register_buffer("row", torch.zeros(1).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen = x.detach().sum(0)
        self.count += 1
        self.inner.row = self.mean[:1].expand(3)
        return x - self.mean


def test_a_copy_puts_back_what_a_forward_pass_has_assigned():
    model: Any = Moving()
    model(torch.ones(4, 2))
    copy = buffers.BufferCopy(model)
    for _ in range(2):
        before = {name: value.clone() for name, value in model.named_buffers(remove_duplicate=False)}
        tensor = model.mean
        copy.save()
        for _ in range(2):  # it is put back as often as it is asked for
            model(torch.full((4, 2), float("nan")))
            copy.put_back()
            now = dict(model.named_buffers(remove_duplicate=False))
            assert now.keys() == before.keys()
            assert all(now[name].equal(value) for name, value in before.items())
        assert model.mean is tensor
        model(torch.ones(4, 2))


def test_an_expanded_buffer_takes_no_memory():
    model: Any = Moving()
    row, copy = model.inner.row, buffers.BufferCopy(model)
    model(torch.ones(4, 2))
    copy.put_back()
    assert model.inner.row is row
    assert id(row) not in copy.copies


def test_a_copy_is_written_where_the_last_one_was():
    model: Any = Moving()
    copy = buffers.BufferCopy(model)
    before = copy.copies[id(model.count)]
    model.count += 1
    copy.save()
    assert copy.copies[id(model.count)] is before
    assert before == 1


def test_a_buffer_that_was_none_is_none_again():
    model: Any = Moving()
    with buffers.restored_buffers(model):
        model(torch.ones(4, 2))
        assert model.seen is not None
    assert model.seen is None


@in_world
def first_step(world: World) -> None:
    number = world.rank
    model: Any = Odd()
    if number == 1:
        for name in ("int16", "uint16", "one", "turned", "table"):
            getattr(model, name).data.fill_(3)
        model.float8.copy_(torch.zeros(2))
    wrapped = DDP(world).wrap(TrainStep(Classification(nn.CrossEntropyLoss()), model))
    for _ in range(2):
        wrapped((torch.ones(2, 4) * number, torch.tensor([0, 1]))).loss.backward()
    assert model.weight.grad is not None
    for name in ("int16", "uint16", "one", "turned"):
        assert getattr(model, name).equal(ODD[name]()), name
    assert model.table.equal(ODD["int16"]())
    assert model.float8.float().equal(ODD["float8"]().float())
    model.int16.fill_(number)
    buffers.broadcast(model.buffers(), world)
    assert model.int16.tolist() == [0, 0]
    gaps = (torch.arange(10.0) + 10 * number)[::2]
    buffers.broadcast([gaps], world)
    assert gaps.tolist() == [0, 2, 4, 6, 8]
    gaps = (torch.arange(6.0) + 10 * number)[::2]
    buffers.average([gaps], world)
    assert gaps.tolist() == [5, 7, 9]


@pytest.mark.integration
def test_two_ranks_begin_with_those_of_rank_0(on_two_ranks):
    on_two_ranks(first_step)


def test_the_average_by_hand():
    model = nn.BatchNorm1d(1)
    ema = Ema(model, decay=0.5)
    expected = None
    for step, value in enumerate([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0]):
        with torch.no_grad():
            model.weight.fill_(value)
            model.num_batches_tracked.fill_(step)
        ema.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = value if expected is None else decay * expected + (1 - decay) * value
        assert ema.model.weight.item() == pytest.approx(expected)
        assert ema.model.num_batches_tracked.item() == step
    assert not ema.model.weight.requires_grad


def test_it_goes_on_where_it_was():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = Ema(model, 0.9), Ema(other, 0.9)
    for _ in range(3):
        first.update(model)
    second.load_state_dict(first.state_dict())
    for ema in (first, second):
        ema.update(other)
    assert torch.equal(first.model.weight, second.model.weight)
    assert first.state_dict()["steps"] == 4


class Changing(nn.Linear):
    """Has a buffer that is None at first, one that grows, and others that come, go and part."""

    def __init__(self, in_features: int = 4, out_features: int = 3) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("late", None)
        self.register_buffer("bank", torch.zeros(0, 4))
        self.register_buffer("gone", torch.ones(2))
        self.register_buffer("mean", torch.zeros(4))
        self.inner = nn.Module()
        self.inner.register_buffer("mean", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.detach().mean(0)
            self.late = mean if self.late is None else 0.5 * self.late + mean
            self.bank = torch.cat([self.bank, mean[None]])
            self.gone = None if self.gone is not None else mean
            self.mean = 0.5 * self.mean + mean
            if len(self.bank) == 2:
                self.register_buffer("own", mean.double(), persistent=False)
            elif len(self.bank) == 3:
                self._buffers.pop("own", None)
        return super().forward(x)


class Resized(Changing):
    """Takes buffers of a checkpoint as they are there, and shares none."""

    def __init__(self, in_features: int = 4, out_features: int = 3) -> None:
        super().__init__(in_features, out_features)
        self.inner.mean = self.mean.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("late", "bank", "gone"):
            self._buffers[name] = state_dict.get(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_the_average_takes_buffers_that_have_no_average_from_the_model():
    model: Any = Changing()
    ema = Ema(model, 0.9)
    for _ in range(4):
        model(torch.rand(2, 4))
        ema.update(model)
        average: Any = ema.model
        found, wanted = (dict(part.named_buffers()) for part in (average, model))
        assert found.keys() == wanted.keys()
        assert found["bank"].equal(model.bank)
        assert found["bank"] is not model.bank
        assert "own" not in found or found["own"].dtype == torch.float64
        assert average.state_dict().keys() == model.state_dict().keys()
    assert not average.late.equal(model.late), "from the second step on, it has an average"
    model.inner.mean = model.mean
    ema.update(model)
    assert average.inner.mean is average.mean


def test_buffers_that_change_are_saved_and_resumed_where_the_model_takes_them(train):
    parts = {"model": {"_target_": f"{__name__}.Resized"}}
    stopped = train(parts=parts, ema_decay=0.9, stop_at=("update", 1))
    whole, again = train(parts=parts, ema_decay=0.9), train(parts=parts, ema_decay=0.9, resume=stopped.last)
    assert stopped.value["interrupted"]
    assert flat(read(again.last)["ema"]) == flat(read(whole.last)["ema"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("bank",), r"the buffer bank of shape \(4, 4\), which is of shape \(0, 4\) where it is built. Build"),
        (("late",), r"the buffer late of shape \(4,\), which is None where it is built. Build it with"),
    ],
)
def test_a_buffer_that_torch_cannot_load_is_named_with_what_to_do(train, names, said):
    first = train(parts={"model": {"_target_": f"{__name__}.Changing"}}, epochs=1)
    saved = read(first.last)["model"]
    fresh = Changing().state_dict()
    model = {name: saved[name] if name in names or name in ("weight", "bias") else fresh[name] for name in fresh}
    model |= {name: saved[name] for name in names}
    with pytest.raises(CheckpointError, match=f"^the checkpoint is not of this model: it has {said}"):
        buffers.load_weights(Changing(), {"model": model})
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint is not of this model: Error.* size mismatch for weight"
    ):
        buffers.load_weights(Changing(out_features=4), {"model": model})


def test_a_model_that_gets_other_modules_has_no_average():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    ema = Ema(model, 0.9)
    ema.update(model)
    model[1] = nn.BatchNorm1d(2)
    with pytest.raises(
        ConfigError, match=r"^trainer\.ema_decay averages .* Sequential .* has other modules or parameters"
    ):
        ema.update(model)
    model.append(nn.BatchNorm1d(2, affine=False))
    with pytest.raises(ConfigError, match="has other modules"):
        ema.update(model)
