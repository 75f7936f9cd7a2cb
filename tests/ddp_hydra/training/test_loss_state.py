"""A loss whose config has changed since the checkpoint: what it has counted stays, what the config gives is new."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra import results
from ddp_hydra.config.hydra_compat import config_of
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.tasks import Classification, Step, Task
from ddp_hydra.training import builders, load_run, loss_state
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.load_run import refuse_targets
from tests.ddp_hydra.training.loop_runs import BY_LOSS, Numbers, config, flat


class Counts(nn.Module):
    """Weighs classes by the numbers of their samples, and by weights of the config; its noise is drawn."""

    def __init__(self, floor: float = 0.1, given: Any = (1.0, 1.0, 1.0), n: int = 3) -> None:
        super().__init__()
        self.floor = floor
        self.register_buffer("counts", torch.ones(n))
        self.register_buffer("noise", torch.randn(3))
        self.register_buffer("given", torch.tensor(list(given)))
        self.fixed = nn.Parameter(torch.tensor(list(given)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts += torch.bincount(target, minlength=3)
        weight = self.given * self.fixed / (self.counts / self.counts.sum() + self.floor)
        return F.cross_entropy(prediction + self.bias + self.noise, target, weight)


class Other(nn.Module):
    """Another one, of other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.ones(3))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction, target, self.alpha)


class Own(Task):
    """Makes its loss itself."""

    def __init__(self, kind: str = "counts", share: float = 1.0, **options: Any) -> None:
        kinds = {"counts": Counts, "other": Other, "weighted": lambda: nn.CrossEntropyLoss(torch.ones(3))}
        self.share, self.criterion = share, kinds[kind](**options)

    def step(self, model: Any, batch: Any) -> Step:
        return Step(self.share * self.criterion(model(batch[0]), batch[1]), len(batch[1]))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(prediction, target) * self.scale


class Wrapping(Classification):
    """Puts the loss into another one."""

    def __init__(self, criterion: nn.Module, scale: float = 1.0, **options: Any) -> None:
        super().__init__(criterion=Wrapped(criterion, scale), **options)


def of_task(kind: type[Task], /, **options: Any) -> dict[str, Any]:
    return {**BY_LOSS, "task": {"_target_": f"{__name__}.{kind.__name__}", "metric": "loss", **options}}


def of_loss(kind: type[nn.Module] = Counts, /, **options: Any) -> dict[str, Any]:
    return {**BY_LOSS, "loss": {"_target_": f"{__name__}.{kind.__name__}", **options}}


NINE = [1.0, 9.0, 1.0]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (of_loss(floor=0.1), of_loss(floor=0.2, given=NINE)),
        (of_task(Own), of_task(Own, floor=0.2, given=NINE)),
        ({**of_task(Wrapping), **of_loss()}, {**of_task(Wrapping, scale=2.0), **of_loss(given=NINE)}),
    ],
    ids=["given", "made by the task", "wrapped by the task"],
)
def test_a_resume_takes_what_the_config_gives_and_keeps_the_rest(train, first, then):
    stopped = train(whole=first, stop_at=("update", 3))
    saved = {name.removeprefix("inner."): one for name, one in read(stopped.last)["loss"].items()}
    resumed = read(train(whole=then, resume=stopped.last, max_steps=3, epochs=None).last)["loss"]
    resumed = {name.removeprefix("inner."): one for name, one in resumed.items()}
    assert resumed["given"].tolist() == resumed["fixed"].tolist() == NINE
    for name in ("counts", "noise", "bias"):
        assert flat(resumed[name]) == flat(saved[name]), name
    assert saved["counts"].sum() == 3 + 2 * stopped.value["steps"]


def test_each_key_of_a_checkpoint_has_a_row_in_the_docs(train):
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    content = read(train(whole=of_loss(), epochs=1, ema_decay=0.9).last)
    assert "loss" in content
    assert content.keys() <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_other_keys_of_the_task_change_nothing_of_its_loss(train):
    stopped = train(whole=of_task(Own), stop_at=("update", 3))
    resumed = train(whole=of_task(Own, share=0.5), resume=stopped.last, max_steps=3, epochs=None)
    assert flat(read(resumed.last)["loss"]) == flat(read(stopped.last)["loss"])


def test_a_loss_of_another_kind_begins_anew(train):
    stopped = train(whole=of_task(Own, kind="weighted"), stop_at=("update", 3))
    assert read(train(whole=of_task(Own, kind="other"), resume=stopped.last).last)["loss"].keys() == {"alpha"}


def test_a_loss_that_can_not_be_built_as_before_begins_its_buffers_anew_and_says_so(train, capsys, monkeypatch):
    stopped = train(whole=of_loss(floor=0.1), stop_at=("update", 3))

    class Renamed(Counts):
        def __init__(self, least: float = 0.1) -> None:
            super().__init__(least)

    Renamed.__name__ = "Counts"
    monkeypatch.setattr(sys.modules[__name__], "Counts", Renamed)
    given = of_loss(least=0.1)
    resumed = read(train(whole=given, resume=stopped.last, max_steps=3, epochs=None).last)["loss"]
    assert resumed["counts"].tolist() == [1, 1, 1]
    assert flat(resumed["bias"]) == flat(read(stopped.last)["loss"]["bias"])
    said = "Counts can't be built by the former loss config"
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [said]


def test_a_loss_of_another_shape_is_refused_in_a_sentence():
    said = r"^Counts does not take its state of the checkpoint"
    with pytest.raises(CheckpointError, match=said + r": it has the buffer counts of shape \(4,\)"):
        load_run.load_part(Counts(), "loss", "Counts", Counts(n=4).state_dict())
    with pytest.raises(CheckpointError, match=said + r" \(RuntimeError: .*Missing key.* resume with the loss that"):
        load_run.load_part(Counts(), "loss", "Counts", Other().state_dict())


@pytest.mark.parametrize("given", [of_loss, lambda **options: of_task(Own, **options)], ids=["given", "of the task"])
def test_an_evaluation_with_another_config_has_what_was_counted(train, given):
    saved = read(train(whole=given()).last)
    cfg = OmegaConf.create({**config(), **given(floor=0.5, given=NINE)})
    task: Any = builders.task(cfg, Numbers(9), torch.device("cpu"))
    load_run.restore_task(task, {"task": None, **saved}, cfg, Numbers(9))
    assert task.criterion.given.tolist() == NINE
    assert task.criterion.counts.equal(saved["loss"]["counts"])


def test_what_no_checkpoint_keeps_of_the_config_is_no_change(monkeypatch):
    monkeypatch.delenv("NOT_HERE", raising=False)
    before = {**config(), **of_task(Own, token="***", floor="${oc.env:NOT_HERE}", given=NINE)}
    cfg = OmegaConf.create({**config(), **of_task(Own, token="mine", floor=0.1, given=NINE)})
    loss, saved = Counts(given=NINE), Counts(given=NINE).state_dict()
    assert loss_state.fitting(loss, saved, before, cfg, None) is saved


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        (["https://***@host", "${n}"], ["https://u:pw@host", 3]),
        ({"urls": ["***"]}, {"urls": ["mine"]}),
        (r"\${n}", "${n}"),  # ranks get values: the text has no backslash any more
        (None, None),
    ],
    ids=["secret in a list", "secret in a list of a dict", "escaped", "none"],
)
def test_a_value_that_reads_the_same_is_no_change(stored, now):
    before = {**config(), **of_task(Own, given=stored), "loss": None, "n": 3}
    cfg = config_of({**config(), **of_task(Own, given=now), "loss": None, "n": 3})
    loss, saved = Counts(), Counts().state_dict()
    assert loss_state.fitting(loss, saved, before, cfg, None) is saved


def test_a_resume_without_a_change_builds_no_other_loss(train, monkeypatch):
    given = {**of_task(Own, kind="weighted"), "loss": None}
    stopped = train(whole=given, stop_at=("update", 3))
    monkeypatch.setattr(loss_state, "_former", mock.Mock(side_effect=AssertionError))
    train(whole=given, resume=stopped.last, max_steps=3, epochs=None)


def test_a_resume_finds_a_change_of_a_key_that_the_loss_refers_to(train):
    first, then = ({**of_loss(given="${weights}"), "weights": weights} for weights in ([1.0, 1.0, 1.0], NINE))
    stopped = train(whole=first, stop_at=("update", 3))
    resumed = read(train(whole=then, resume=stopped.last, max_steps=3, epochs=None).last)["loss"]
    assert resumed["given"].tolist() == NINE
    assert resumed["counts"].equal(read(stopped.last)["loss"]["counts"])


@pytest.fixture
def resolved():
    """Return what a resolver of the project was called with."""
    found: list[str] = []
    OmegaConf.register_new_resolver("own_call", lambda text: found.append(text) or 0.3)
    yield found
    OmegaConf.clear_resolver("own_call")


READS = {"read": "${own_call:x}", "start": "$", "end": "{own_call:x}"}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "floor", ["${own_call:x}", r"\${own_call:x}", "${mine.read}", "${mine.start}${mine.end}", r"\\\${mine.read}"]
)
def test_a_config_that_is_not_trusted_calls_no_resolver(resolved, monkeypatch, floor):
    monkeypatch.setattr(load_run, "CLASSES", (*load_run.CLASSES, __name__))
    results.connect(mock.Mock())
    cfg = OmegaConf.create({**config(), **of_loss(floor=0.5, given=NINE)})
    before = {**config(), **of_loss(floor=floor, given=[1.0, 1.0, 1.0]), "mine": READS}
    content = {"task": None, "loss": Counts().state_dict(), "config": before}
    task: Any = builders.task(cfg, Numbers(9), torch.device("cpu"))
    load_run.restore_task(task, content, cfg, Numbers(9), trust=False)
    assert task.criterion.given.tolist() == NINE
    assert resolved == []


def test_only_a_former_task_and_loss_that_are_others_have_to_be_trusted(monkeypatch):
    monkeypatch.setattr(load_run, "CLASSES", (*load_run.CLASSES, f"{__name__}.Counts"))
    typed = {
        "model": {"_target_": "somewhere.Net"},
        "task": {**config()["task"], "names": {"_target_": "somewhere.Names"}},
    }
    before, cfg = {**config(), **of_loss(), **typed}, OmegaConf.create({**config(), **of_loss(floor=0.2), **typed})
    check = mock.Mock()
    loss_state.fitting(Counts(), Counts().state_dict(), before, cfg, None, check=check)
    assert [call.args[0] for call in check.call_args_list] == [{"loss": before["loss"]}]


class Signed(Own):
    """Tells what it was given."""

    def __init__(self, token: str, level: int) -> None:
        if level == 1:
            raise ValueError(token)
        super().__init__()


@pytest.mark.usefixtures("group")
def test_a_secret_that_a_former_config_is_built_with_is_not_told(capsys):
    results.connect(mock.Mock())
    before = {**config(), **of_task(Signed, token="***", level=1)}
    cfg = OmegaConf.create({**config(), **of_task(Signed, token="mine", level=2)})
    loss_state.fitting(Counts(), Counts().state_dict(), before, cfg, None)
    told = capsys.readouterr().err
    assert "can't be built by the former task config (ValueError), which" in told
    assert "mine" not in told


@pytest.mark.usefixtures("group")
def test_a_config_that_is_not_trusted_is_not_built(capsys, monkeypatch):
    monkeypatch.setattr(load_run, "CLASSES", (*load_run.CLASSES, __name__))
    results.connect(mock.Mock())
    before = {**config(), **of_loss(given={"_target_": "os.getcwdb"})}
    cfg = OmegaConf.create({**config(), **of_loss()})
    found = loss_state.fitting(Counts(), Counts().state_dict(), before, cfg, None, check=refuse_targets)
    assert "loss.given._target_=os.getcwdb is from a checkpoint" in capsys.readouterr().err
    assert found.keys() == Counts().state_dict().keys()
    with pytest.raises(ConfigError):
        refuse_targets(OmegaConf.create(before))
