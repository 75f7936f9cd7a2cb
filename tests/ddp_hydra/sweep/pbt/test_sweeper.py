"""What the sweeper hands to a launcher, and what it writes."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from ddp_hydra.config.hydra_compat import parse_override
from ddp_hydra.errors import ConfigError, SweepFailed
from ddp_hydra.sweep.pbt import lineage
from ddp_hydra.sweep.pbt.lineage import Entry, ancestors, best_of, describe_best
from ddp_hydra.sweep.pbt.sweeper import PopulationSweeper, quoted
from ddp_hydra.sweep.rows import Objective

ARGUMENTS = ["trainer.epochs=3", "optimizer.lr=tag(log,interval(1e-4,1.0))", "resume=start"]
ACCURACY = Objective("val/accuracy", maximize=True)


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
        direction = options.pop("direction", "maximize")
        config = OmegaConf.create(
            {
                "cluster": {"_target_": "x", "password": "hunter2"}, "dispatch": {}, "trainer": {},
                "objective": {"metric": "val/accuracy", "direction": direction}, "hydra": {"sweep": {"dir": "pop"}},
            }
        )  # fmt: skip
        sweeper = PopulationSweeper(**{"population": 4, "generations": 3} | options)
        loader = SimpleNamespace(load_sweep_config=lambda **_: None)
        sweeper.setup(hydra_context=SimpleNamespace(config_loader=loader), task_function=None, config=config)
        return sweeper

    return make


@pytest.mark.medium
def test_each_generation_is_a_batch_that_goes_on_from_the_one_before(made, tmp_path, caplog):
    sweeper = made(seed=1)
    with caplog.at_level("INFO"):
        returns = sweeper.sweep(ARGUMENTS)
    launcher = sweeper.launcher
    assert [len(batch) for batch in returns] == [4, 4, 4]
    for generation, batch in enumerate(launcher.batches):
        for place, words in enumerate(batch):
            assert words[0] == "trainer.epochs=3"
            entry = sweeper.entries[generation][place]
            pause = [word for word in words if word.startswith("trainer.pause_after_validations=")]
            assert pause == ([f"trainer.pause_after_validations={generation + 1}"] if generation < 2 else [])
            resumed = "resume=start" if generation == 0 else f"resume=pop/jobs/{4 * (generation - 1) + entry.parent}"
            assert [word for word in words if word.startswith("resume=")] == [resumed]
            assert f"optimizer.lr={entry.values['optimizer.lr']}" in words
    assert [label["generation"] for label in launcher.shown] == [*"000011112222"]
    assert [label["parent"] for label in launcher.shown[:4]] == [""] * 4
    with (tmp_path / "pop" / "lineage.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["folder"] for row in table] == [f"jobs/{number}" for number in range(12)], "subdir may be nested"
    assert [row["parent"] for row in table] == [label["parent"] for label in launcher.shown]
    assert {path.name for path in (tmp_path / "pop").iterdir()} == {
        "lineage.csv", "lineage.md", "lineage.png", "lineage.svg", "multirun.yaml",
    }  # fmt: skip
    assert OmegaConf.load(tmp_path / "pop" / "multirun.yaml").cluster.password == "***"
    best = best_of(sweeper.entries, ACCURACY)
    place = f"pop/jobs/{8 + best.member}/checkpoints/last.pt"
    assert f"best: member {best.member} with val/accuracy {best.score:.5g}  ->  {place}" in caplog.text


@pytest.mark.medium
def test_twice_the_same_seed_gives_the_same_files(made, tmp_path):
    files = []
    for seed in (3, 3, 4):
        sweeper = made(seed=seed, params={"optimizer.lr": "tag(log,interval(1e-4,0.4))"})
        sweeper.sweep(["trainer.epochs=3"])
        files.append({path.name: path.read_bytes() for path in (tmp_path / "pop").iterdir()})
    assert files[0] == files[1]
    assert files[0]["lineage.csv"] != files[2]["lineage.csv"]


@pytest.mark.medium
def test_a_member_that_fails_copies_another_one(made):
    sweeper = made(params={"optimizer.lr": "0.01,0.9"}, population=12, generations=2)
    sweeper.sweep([])
    failed = [entry.member for entry in sweeper.entries[0] if entry.score is None]
    assert failed
    for member in failed:
        parent = sweeper.entries[1][member].parent
        assert sweeper.entries[0][parent].score == 1.0


def test_if_all_fail_it_ends(made):
    with pytest.raises(SweepFailed, match=r"generation 0: no member is left; see .*/pop/sweep\.md"):
        made().sweep(["optimizer.lr=0.8,0.9"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=1"], "has no keys to search"),
        (["a=1,2", "trainer.pause_after_validations=3"], "give hydra.sweeper.validations instead"),
        (["+trainer.pause_after_validations=1,2"], "give hydra.sweeper.validations instead"),
        (["a=1,2", "resume=a,b"], "resume can't be searched"),
    ],
)
def test_keys_of_its_own_are_refused(made, arguments, message):
    with pytest.raises(ConfigError, match=message):
        made().sweep(arguments)


def test_what_it_cannot_train_is_refused(made):
    with pytest.raises(ConfigError, match=r"give objective\.direction=maximize or minimize"):
        made(direction="up")
    with pytest.raises(ConfigError, match="for ddp_hydra's configs only"):
        PopulationSweeper().setup(hydra_context=None, task_function=None, config=OmegaConf.create({}))


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("multirun/2026-11-23/a_1/0", "multirun/2026-11-23/a_1/0"),
        ("a b/it's", "'a b/it\\'s'"),
        ("a=1,b=2", "'a=1,b=2'"),
        ("a\\b", "'a\\b'"),
        ("a\\'b\\", "'a\\\\\\'b\\\\'"),
    ],
)
def test_a_path_is_one_value(path, word):
    assert quoted(path) == word
    assert parse_override(f"resume={word}").value() == path


def test_the_best_is_told_with_its_ancestors(monkeypatch):
    monkeypatch.chdir("/")
    generations = [
        [Entry(0, 0, None, {"lr": "1"}, 0.5, "/s/0"), Entry(0, 1, None, {"lr": "2"}, 0.6, "/s/1")],
        [Entry(1, 0, 1, {"lr": "3"}, 0.9, "/s/2"), Entry(1, 1, 1, {"lr": "2"}, None, "/s/3")],
    ]
    best = best_of(generations, ACCURACY)
    assert [(one.generation, one.member) for one in ancestors(generations, best)] == [(0, 1), (1, 0)]
    assert describe_best(generations, ACCURACY, "s").splitlines() == [
        "best: member 0 with val/accuracy 0.9  ->  s/2/checkpoints/last.pt",
        "  generation 0, member 1: lr=2",
        "  generation 1, member 0: lr=3",
    ]
    text = lineage.markdown_text(generations, ACCURACY)
    assert "- generation 1, member 0: 0.9 with lr=3" in text
    assert "- member 0 copied member 1: lr=3" in text
    lost = [[Entry(0, 0, None, {"lr": "1"}, None, "/s/0")]]
    assert "all members of generation 0 have failed" in describe_best(lost, ACCURACY, "s")


def test_without_values_there_is_no_picture(tmp_path):
    assert not lineage.draw(tmp_path, [[Entry(0, 0, None, {}, None, "0")]], ACCURACY)
    assert not list(tmp_path.iterdir())
