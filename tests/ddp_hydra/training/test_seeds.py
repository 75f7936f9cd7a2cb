"""What models, validations and predictions draw: alike in a run, its resume, and what is done with its checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.rank.world import ALONE
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training import builders, export, inference, load_run
from ddp_hydra.training.callbacks import Callback
from tests.ddp_hydra.training.loop_runs import check_resume

NUMBERS = {"_target_": "tests.ddp_hydra.training.loop_runs.Numbers", "n": 5}


class Sketched(nn.Module):
    """What it draws when it is built is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sketch", torch.randn(4, 4), persistent=False)
        self.shift, self.head = torch.randn(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x @ self.sketch + self.shift)


class Noisy(Task):
    """Draws in training, validation and prediction."""

    def step(self, model: Any, batch: Any) -> Step:
        x, y = batch
        return Step(F.cross_entropy(self.predict(model, batch), y) * (1 + np.random.rand()), len(x))

    def predict(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0] + torch.randn_like(batch[0]))


class Notes(Callback):
    """Draws at each validation."""

    def on_validation(self, run: Any) -> None:
        run.log({"my/note": torch.rand(())})


GIVEN = {
    "callbacks": {"notes": {"_target_": f"{__name__}.Notes"}},
    "model": {"_target_": f"{__name__}.Sketched"},
    "task": {"_target_": f"{__name__}.Noisy", "metric": "loss"},
    "objective": {"metric": "val/loss", "direction": "minimize"},
    "data": {"batch_size": 2, "train": {**NUMBERS, "n": 9}, "val": NUMBERS},
}
JOB = {"faults": [], "overrides": [], "groups": [], "split": "val", "trust": True}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr("ddp_hydra.config.project.starter", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def evaluated(checkpoint: Path, *words: str) -> float:
    with inference.opened(JOB | {"overrides": words}, str(checkpoint), ALONE) as opened:
        trained = opened.trained
        evaluation = builders.evaluation(trained.cfg, opened.data, opened.task, trained.device, trained.parallel)
        return evaluation.run(trained.model, lambda: 0)["val/loss"]


@pytest.mark.parametrize("stop_at", [("update", 3), ("validate", 4), ("update", 8)], ids=str)
def test_a_validation_draws_the_same_in_a_resumed_run(train, stop_at):
    given = {"whole": GIVEN, "validate_every_steps": 3}
    whole, stopped = check_resume(train, stop_at, **given)
    notes = [note for run in (stopped, train(resume=stopped.last, **given)) for note in run.metrics("my/note")]
    assert notes == whole.metrics("my/note")


def test_an_evaluation_draws_as_the_validation_of_the_run(train):
    run = train(whole=GIVEN)
    assert evaluated(run.last) == evaluated(run.last) == run.metrics("val/loss")[-1][1]


@pytest.mark.parametrize(
    "data", [{"batch_size": 3, "global_batch": 2}, {"batch_size": None, "global_batch": 2}], ids=str
)
def test_an_evaluation_has_the_batch_size_of_the_run(train, data):
    run = train(whole={**GIVEN, "data": {**GIVEN["data"], **data}})
    assert evaluated(run.last) == run.metrics("val/loss")[-1][1]
    assert evaluated(run.last, "data.batch_size=3") != evaluated(run.last)


def test_a_validation_leaves_the_generators_as_they_were(train):
    torch.manual_seed(1)
    run = train(whole=GIVEN)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    evaluated(run.last)
    load_run.load(run.last, trust=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def predicted(checkpoint: Path, done: list[int], monkeypatch: Any) -> dict[int, Any]:
    parts: dict[int, Any] = {}

    def note(spool: Any, part: int) -> None:
        spool.seek(0)
        parts[part] = spool.read()

    monkeypatch.setattr(inference, "submit", note)
    job = {**JOB, "done": done, "kind": "table", "targets": True}
    with inference.opened(job, str(checkpoint), ALONE) as opened:
        trained = opened.trained
        loader = inference.build_data.loader(trained.cfg, opened.data, trained.device, False, ALONE)
        inference.send_samples(opened, loader)
    return parts


def test_a_prediction_draws_by_its_samples(train, monkeypatch):
    run = train(whole=GIVEN)
    whole = predicted(run.last, [], monkeypatch)
    assert predicted(run.last, [0], monkeypatch) == {part: whole[part] for part in (1, 2)}
    assert len(set(whole.values())) == len(whole) == 3


def test_a_model_that_draws_is_exported(train, tmp_path):
    trained = load_run.load(train(whole=GIVEN).last, trust=True)
    example = export.example_of(trained, "val", None)
    assert export.export(trained, example, "torch", tmp_path / "model.pt", 1e-5)["difference"] == 0
