"""How the configs of jobs are composed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from ddp_hydra.cli.compose import layered
from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep import queue

pytestmark = pytest.mark.medium

FILES = {
    "config": """
defaults: [_self_, model: small, optimizer: sgd]
seed: 0
name: null
sizes: [1, 2]
data: {batch_size: 8, of_model: "${model.width}"}
twice: {n: "${seed}"}
""",
    "model/small": "{width: 4, kind: small}",
    "model/large": "{width: 64, kind: large}",
    "optimizer/sgd": "{lr: 0.1, momentum: 0.9}",
    "optimizer/adam": "{lr: 0.001, betas: [0.9, 0.99]}",
}

NOTHING = OmegaConf.create()


@pytest.fixture
def real(tmp_path):
    """Hydra's loader, which counts what it composes, and the config of a sweep."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", ["hydra.job.chdir=false"], RunMode.MULTIRUN)
        yield Counted(loader), master


class Counted:
    def __init__(self, loader):
        self.loader, self.composed, self.loads = loader, 0, "another of Hydra's"

    def load_sweep_config(self, master, overrides):
        self.composed += 1
        return self.loader.load_sweep_config(master, overrides)


def content(config):
    return (
        OmegaConf.to_container(config),
        OmegaConf.is_struct(config),
        OmegaConf.to_container(config.data, resolve=True),
    )


@pytest.mark.parametrize(
    ("jobs", "composed"),
    [
        ([["optimizer.lr=0.1", "data.batch_size=2"], ["optimizer.lr=1e-3", "data.batch_size=null"]], 1),
        ([["optimizer=adam", "optimizer.lr=0.1"], ["optimizer=adam", "optimizer.lr=true"]], 1),
        ([["model=small", "seed=1"], ["model=large", "seed=1"], ["model=large", "seed=2"]], 2),
        ([["+new=1"], ["+new=2"]], 2),
        ([["seed=1", "name='a b'"], ["seed=2", "name='a c'"]], 2),
        ([["data={batch_size:1}", "data.batch_size=3"], ["data={batch_size:1}", "data.batch_size=4"]], 2),
        ([["seed=1", "seed=2"], ["seed=3", "seed=4"]], 2),
    ],
)
def test_what_is_derived_is_what_hydra_composes(real, jobs, composed):
    counted, master = real
    loader = queue.CachingConfigLoader(counted)
    for overrides in jobs:
        expected = content(counted.loader.load_sweep_config(master, overrides))
        assert content(loader.take(master, overrides)) == expected
    assert counted.composed == composed


def test_a_derived_config_is_its_jobs_own(real):
    counted, master = real
    loader = queue.CachingConfigLoader(counted)
    first, second, third = (loader.take(master, [f"optimizer.lr={lr}"]) for lr in (1, 2, 3))
    first.optimizer.momentum = second.optimizer.momentum = 0
    assert (third.optimizer.lr, third.optimizer.momentum) == (3, 0.9)
    assert counted.composed == 1


def test_mistakes_are_hydras_own(real):
    counted, master = real
    loader = queue.CachingConfigLoader(counted)
    loader.take(master, ["optimizer.lr=1"])
    for overrides in (["optimizer.learning_rate=1"], ["optimizer.learning_rate=2"], ["model=huge"]):
        with pytest.raises(Exception, match=r"(?i)could not") as ours:
            loader.take(master, overrides)
        with pytest.raises(type(ours.value)) as hydras:
            counted.loader.load_sweep_config(master, overrides)
        assert str(ours.value) == str(hydras.value)


def test_of_many_jobs_those_with_a_new_word_are_checked():
    class Loader:
        def __init__(self):
            self.calls = []

        def load_sweep_config(self, master, overrides):
            self.calls.append(overrides)
            return OmegaConf.create({"n": len(self.calls)})

    loader = queue.CachingConfigLoader(real := Loader())
    jobs = [[f"lr={n / 1000}", "model=a"] for n in range(200)]
    for overrides in jobs:
        loader.load_sweep_config(NOTHING, overrides)
    assert real.calls == jobs[: queue.CHECKED]
    for overrides in (["lr=7", "model=typo"], ["lr=8", "model=typo"], ["lr=9", "model=a"]):
        loader.load_sweep_config(NOTHING, overrides)
    assert real.calls[queue.CHECKED :] == [["lr=7", "model=typo"]]
    assert len(loader.composed) == queue.CHECKED
    assert loader.take(NOTHING, jobs[150]).n == queue.CHECKED + 2, "the others are composed when they start"


@pytest.fixture
def ours():
    """Our own configs: Hydra's loader, and the config of a sweep."""
    schema.register()
    with layered() as folder, initialize_config_dir(str(folder), job_name="ddp_hydra", **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        yield queue.CachingConfigLoader(loader), loader.load_configuration("config", [], RunMode.MULTIRUN)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optimizer.lr", "abc", "optimizer.lr=abc: give a number; optimizer=sgd has "),
        ("data.batch_size", "-1", "data.batch_size=-1: give a whole number of at least 1, or null"),
    ],
)
def test_a_value_that_no_job_can_have_is_refused_before_the_first_job(ours, key, value, said, monkeypatch):
    monkeypatch.setattr(queue, "CHECKED", 2)
    loader, master = ours
    for of_the_job in ("optimizer.lr", "+optimizer.stamp"):  # what only the job knows is not looked at before
        loader.load_sweep_config(master, [of_the_job + "=${hydra:job.num}", "seed=1"])
    for number in range(1, 4):
        loader.load_sweep_config(master, [f"{key}={number}", "seed=1"])
    with pytest.raises(ConfigError, match=said):
        loader.load_sweep_config(master, [f"{key}={value}", "seed=1"])
    loader.take(master, [f"{key}=1", "seed=1"])
    loader.load_sweep_config(master, [f"{key}={value}", "seed=2"])
    loader.load_sweep_config(master, [f"{key}={value.replace('-1', '-2')}", "seed=3"])  # a sweeper's later batch


@pytest.mark.parametrize("word", ["+extra={p:1}", "++extra=1", "+trainer.extra=1"])
def test_a_new_key_that_no_job_can_have_is_refused_before_the_first_job(ours, word):
    loader, master = ours
    key = word.lstrip("+").partition("=")[0]
    for allowed in ("+optimizer.extra=true", "+data.train.extra=1"):
        loader.load_sweep_config(master, [allowed])
    with pytest.raises(ConfigError, match=f"^{key}: there is no such key"):
        loader.load_sweep_config(master, [word])
    loader.take(master, ["seed=1"])
    loader.load_sweep_config(master, [word.replace("1", "2")])  # a sweeper's later batch


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        ("optimiser: {lr: 1}", ["seed=1"], "^config.yaml: optimiser: there is no such key: did you mean optimizer"),
        ("", ["seed=1", "experiment=mine"], "^experiment/mine.yaml: optimiser: there is no such key"),
        ("", ["+extras=default", "+extras.b=1", "seed=1"], None),
        ("logs: {dir: x}\nhydra: {sweep: {dir: '${logs.dir}'}}", ["seed=1"], None),
    ],
)
def test_mistakes_in_files_are_refused_before_the_first_job(tmp_path, monkeypatch, main, words, said):
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    files = {
        "config": f"defaults: [job, _self_, experiment: null]\n{main}\n",
        "experiment/mine": "# @package _global_\noptimiser: {lr: 1}\n",
        "extras/default": "a: 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    schema.register()
    with layered() as folder, initialize_config_dir(str(folder), job_name="ddp_hydra", **VERSION_BASE):
        hydras = GlobalHydra.instance().config_loader()
        loader, master = queue.CachingConfigLoader(hydras), hydras.load_configuration("config", [], RunMode.MULTIRUN)
        if "experiment=mine" in words:
            loader.load_sweep_config(master, ["seed=1"])
        with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
            loader.load_sweep_config(master, words)


def test_what_was_composed_to_be_checked_is_not_composed_again(real):
    counted, master = real
    loader = queue.CachingConfigLoader(counted)
    checked = [loader.load_sweep_config(master, [f"model={name}"]) for name in ("small", "large", "small")]
    assert counted.composed == 2
    assert loader.take(master, ["model=large"]) is checked[1]
    assert loader.take(master, ["model=small"]) is checked[2]
    assert all(loader.take(master, ["model=small"]) is not config for config in checked), "each job has its own"
    assert loader.loads == "another of Hydra's"
