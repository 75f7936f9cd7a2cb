"""What the sweeper hands to a launcher, and what it writes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError, SweepFailed
from ddp_hydra.sweep.pbt import PopulationSweeper, score_of

ARGUMENTS = ["trainer.epochs=3", "optimizer.lr=tag(log,interval(1e-4,1.0))", "resume=start"]


class Launcher:
    """Ends each job at once: the nearer its learning rate to 0.01, the better; above 0.5 it fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.batches, self.labels, self.shown = folder, [], [], []

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append(job_overrides)
        self.shown += self.labels
        found = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            lr = float(next(word for word in overrides if word.startswith("optimizer.lr="))[13:])
            result = JobReturn(overrides, working_dir=str(self.folder / "jobs" / str(number)))
            result.status = JobStatus.FAILED if lr > 0.5 else JobStatus.COMPLETED
            result._return_value = RuntimeError("no") if lr > 0.5 else 1 - abs(math.log10(lr) + 2) / 4
            found.append(result)
        return found


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A sweeper with such a launcher."""
    monkeypatch.chdir(tmp_path)

    def make(**options) -> PopulationSweeper:
        launcher = Launcher(tmp_path / "pop")
        monkeypatch.setattr(Plugins.instance(), "instantiate_launcher", lambda **_: launcher)
        config = OmegaConf.create(
            {
                "cluster": {"_target_": "x"}, "dispatch": {}, "trainer": {},
                "objective": {"metric": "val/accuracy", "direction": "maximize"}, "hydra": {"sweep": {"dir": "pop"}},
            }
        )  # fmt: skip
        sweeper = PopulationSweeper(**{"population": 4, "generations": 3} | options)
        loader = SimpleNamespace(load_sweep_config=lambda **_: None)
        sweeper.setup(hydra_context=SimpleNamespace(config_loader=loader), task_function=None, config=config)
        return sweeper

    return make


@pytest.mark.medium
def test_each_generation_is_a_batch_that_goes_on_from_the_one_before(made, caplog):
    sweeper = made(seed=1)
    with caplog.at_level("INFO"):
        returns = sweeper.sweep(ARGUMENTS)
    launcher = sweeper.launcher
    assert [len(batch) for batch in returns] == [4, 4, 4]
    for generation, batch in enumerate(launcher.batches):
        for place, words in enumerate(batch):
            assert words[0] == "trainer.epochs=3"
            label = launcher.shown[4 * generation + place]
            pause = [word for word in words if word.startswith("trainer.pause_after_validations=")]
            assert pause == ([f"trainer.pause_after_validations={generation + 1}"] if generation < 2 else [])
            resumed = (
                "resume=start" if generation == 0 else f"resume=pop/jobs/{4 * (generation - 1) + int(label['parent'])}"
            )
            assert [word for word in words if word.startswith("resume=")] == [resumed]
    assert [label["generation"] for label in launcher.shown] == [*"000011112222"]
    assert [label["parent"] for label in launcher.shown[:4]] == [""] * 4
    best = max(range(4), key=lambda place: sweeper.scores[place] or -1.0)
    checkpoint = f"pop/jobs/{8 + best}/checkpoints/last.pt"
    assert f"best: member {best} with val/accuracy {sweeper.scores[best]:.5g}  ->  {checkpoint}" in caplog.text


@pytest.mark.medium
def test_a_member_that_fails_copies_another_one(made):
    sweeper = made(params={"optimizer.lr": "0.01,0.9"}, population=12, generations=2)
    with pytest.raises(SweepFailed, match=r"^\d+ of 24 jobs have failed: see pop/sweep\.md$"):
        sweeper.sweep([])
    first, second = sweeper.launcher.batches
    failed = [place for place, words in enumerate(first) if "optimizer.lr=0.9" in words]
    assert failed
    for member in failed:
        resumed = next(word for word in second[member] if word.startswith("resume="))
        assert "optimizer.lr=0.01" in first[int(resumed.rpartition("/")[2])]


def test_if_all_fail_it_ends(made):
    with pytest.raises(SweepFailed, match=r"generation 0: no member is left; see .*/pop/sweep\.md"):
        made().sweep(["optimizer.lr=0.8,0.9"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=1"], "has no keys to search"),
        (["a=1,2", "trainer.pause_after_validations=3"], "give hydra.sweeper.validations instead"),
    ],
)
def test_keys_of_its_own_are_refused(made, arguments, message):
    with pytest.raises(ConfigError, match=message):
        made().sweep(arguments)


def test_an_option_that_it_lacks_is_refused(made):
    with pytest.raises(ConfigError, match=r"^hydra\.sweeper\.n_trials: there is no such key; the keys .* population, "):
        made(n_trials=3)


def test_what_it_cannot_train_is_refused():
    with pytest.raises(ConfigError, match="for ddp_hydra's configs only"):
        PopulationSweeper().setup(hydra_context=None, task_function=None, config=OmegaConf.create({}))


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "x"])
def test_what_is_no_finite_number_is_no_score(value):
    result = JobReturn(status=JobStatus.COMPLETED)
    result._return_value = value
    assert score_of(result) is None
