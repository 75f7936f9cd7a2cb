"""What is refused before a cluster is started, and what its class is called with."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import logging
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import LocalCluster
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import without_messages
from ddp_hydra.cluster.kinds import Manager, services
from ddp_hydra.cluster.kinds.local import LocalCuda
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.config.schema import register
from ddp_hydra.errors import ClusterError, ConfigError
from ddp_hydra.rank import environment

CONF = Path(__file__).parents[3] / "conf"
OPTIONS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))


@functools.cache
def composed(name: str) -> DictConfig:
    register()
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return compose("config", [f"cluster={name}"])


def option(name: str, *overrides: str) -> Any:
    """Return an option as Hydra composes it. It is composed once; overrides are put into a copy."""
    cfg = copy.deepcopy(composed(name))
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(cfg, key.lstrip("+"), yaml.safe_load(value), force_add=key.startswith("+"))
    return cfg.cluster


def manager(name: str, *overrides: str) -> Manager:
    cfg = option(name, *overrides)
    return connect.MANAGERS[str(cfg["_target_"]).rpartition(".")[2]](cfg)


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(ClusterError) as caught:
        manager(name, *overrides).check()
    return str(caught.value)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, and a dask_cuda that only takes arguments."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "gpu_uuids", lambda: ["0", "1"])
    package = types.ModuleType("dask_cuda")
    package.__spec__ = importlib.util.spec_from_loader("dask_cuda", None)
    package.LocalCUDACluster = StandIn
    monkeypatch.setitem(sys.modules, "dask_cuda", package)


DASK_CUDA_TAKES = ("CUDA_VISIBLE_DEVICES", "n_workers", "threads_per_worker", "memory_limit", "device_memory_limit")
"""Arguments of dask-cuda 26.10 that our option may give; it passes others on to `distributed.LocalCluster`."""


class StandIn:
    """With the signature of dask-cuda 26.10, as far as our option goes."""

    def __init__(self, CUDA_VISIBLE_DEVICES=None, n_workers=None, threads_per_worker=1, **kwargs):  # noqa: N803
        self.given = {"CUDA_VISIBLE_DEVICES": CUDA_VISIBLE_DEVICES, "n_workers": n_workers, **kwargs}

    def close(self):
        pass


# -- every option ------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "inline"])
def test_our_own_keys_are_keys_of_every_option(name):
    assert {"n_workers", "wait_timeout_s", "keep", "pip"} <= set(option(name))
    assert option(name).get("memory_limit", 0) == 0  # Dask does not count the memory of ranks


@pytest.mark.medium
@pytest.mark.parametrize("name", ["gateway", "gpu", "kubernetes", "saturn", "slurm", "ssh"])
def test_a_package_that_is_missing_is_named_with_the_extra_that_installs_it(name, monkeypatch, gpus):
    find = importlib.util.find_spec
    packages = ("dask_cuda", "dask_gateway", "dask_kubernetes", "dask_saturn", "dask_jobqueue", "asyncssh")
    monkeypatch.delitem(sys.modules, "dask_cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted in packages else find(wanted))
    given = ["cluster.hosts=[a,b]"] if name == "ssh" else []
    said = refused("local_cuda" if name == "gpu" else name, *given)
    assert said.endswith(f"which is not installed here: pip install 'ddp-hydra[{name}]'")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("saturn", [], "set SATURN_BASE_URL and SATURN_TOKEN, as"),
        ("slurm", [], "cluster=slurm: there is no sbatch here: type it on a login node"),
        ("ssh", [], "cluster.hosts is missing: give cluster.hosts=..."),
        ("ssh", ["cluster.hosts=[a]"], "cluster.hosts=['a']: give two or more"),
        ("ssh", ["cluster.hosts=a"], "cluster.hosts=a: give two or more"),
        ("ssh", ["cluster.hosts=[a,b,c]", "cluster.n_workers=3"], "cluster.hosts=['a', 'b', 'c'] make 2 workers"),
        ("local_cuda", ["cluster.n_workers=3"], "cluster.n_workers=3, and there are 2 GPUs here"),
        ("no gpu", [], "cluster=local_cuda: no GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or give"),
        ("none visible", [], "cluster=local_cuda: no GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or give"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_give(name, given, said, monkeypatch, gpus, tmp_path):
    for variable in ("SATURN_BASE_URL", "SATURN_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # there may be a SLURM on this machine
    if name == "no gpu":
        monkeypatch.setattr(environment, "gpu_uuids", list)
    elif name == "none visible":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert said in refused("local_cuda" if name in ("no gpu", "none visible") else name, *given)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["local", "slurm", "ssh"])
def test_what_can_not_be_kept_says_what_to_do_instead(name):
    given = ["cluster.hosts=[a,b]"] if name == "ssh" else []
    said = refused(name, "cluster.keep=true", *given)
    assert "cluster.keep=true: the scheduler of a" in said
    assert "start Dask yourself, and give cluster=remote" in said


def test_hosts_say_how_many_workers_there_are():
    several = manager("ssh", "cluster.hosts=[a,b,c]", "+cluster.worker_options.n_workers=4")
    several.check()
    assert several.expected == 8


def test_messages_with_a_beginning_are_left_out_inside_the_block(caplog):
    scheduler = logging.getLogger("distributed.scheduler")
    with without_messages("distributed.scheduler", "broadcast to "):
        scheduler.error("broadcast to tcp://127.0.0.1:1 failed: CommClosedError: in <TCP (closed) >")
        scheduler.error("anything else")
    scheduler.error("broadcast to nobody")
    assert caplog.messages == ["anything else", "broadcast to nobody"]


def test_what_sbatch_said_is_taken_out_of_the_report():
    report = "Command exited with non-zero exit code.\nExit code: 1\nCommand:\nsbatch x.sh\nstdout:\n\nstderr:\n"
    assert services.sbatch_message(
        report + "sbatch: error: no such thing\nsbatch: error: Batch job submission failed\n\n"
    ) == ("no such thing; Batch job submission failed")
    assert services.sbatch_message("Could not parse job id\nfrom it") == "Could not parse job id; from it"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ([], True),
        (["--mail-user=me"], True),
        (["-o x.log"], False),
        (["--output=x.log"], False),
        (["--open-mode=append"], True),
    ],
)
def test_batch_jobs_print_into_the_folder_of_logs_unless_they_are_told_where(given, ours, tmp_path, monkeypatch):
    folder = tmp_path / '100% "x"'
    chosen = services.Slurm(option("slurm", f"cluster.job_extra_directives={given}"), folder)
    monkeypatch.setattr(chosen, "instantiate", lambda target, arguments: arguments["job_extra_directives"])
    output = f'--output="{tmp_path}/100%% \\"x\\"/slurm-%j.out"'
    assert chosen.open() == given + [output] * ours
    assert folder.is_dir() == ours


# -- GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "workers", "visible"),
    [
        ((), 2, None),
        (("cluster.n_workers=1",), 1, None),
        (("cluster.CUDA_VISIBLE_DEVICES=[0,2,3]",), 3, [0, 2, 3]),
        (("cluster.CUDA_VISIBLE_DEVICES=1",), 1, [1]),
    ],
)
def test_local_cuda_gets_its_arguments(gpus, given, workers, visible):
    chosen = manager("local_cuda", *given)
    chosen.check()
    with chosen.open() as opened:
        native = opened.given
    assert (chosen.expected, native["n_workers"], native["CUDA_VISIBLE_DEVICES"]) == (workers, workers, visible)
    assert native["preload"] == ["ddp_hydra.rank.dask_preload"]
    assert type(native["preload"]) is list  # dask-cuda adds its own to it
    assert native["host"] == "127.0.0.1"
    assert isinstance(chosen, LocalCuda)
    assert not {"keep", "wait_timeout_s"} & native.keys()


def test_dask_cuda_takes_what_local_cuda_gives(gpus):
    chosen = manager("local_cuda")
    chosen.check()
    with chosen.open() as opened:
        passed_on = {name: value for name, value in opened.given.items() if name not in DASK_CUDA_TAKES}
    assert (opened.given["memory_limit"], opened.given["device_memory_limit"]) == (0, None)
    worker = {"preload"}  # LocalCluster takes any argument of its workers
    assert worker < passed_on.keys() <= inspect.signature(LocalCluster.__init__).parameters.keys() | worker


# -- any class ---------------------------------------------------------------------------------------------


class Anything:
    def __init__(self, n_workers=None, shutdown_on_close=None, options=None):
        self.given = {"n_workers": n_workers, "shutdown_on_close": shutdown_on_close, "options": options}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("wait_timeout_s", "soon", "cluster.wait_timeout_s=soon: give seconds, 0 or more"),
        ("client_timeout_s", None, "cluster.client_timeout_s=null: give seconds, 0 or more"),
        ("keep", "maybe", "cluster.keep=maybe: give true or false"),
        ("trust_network", 3, "cluster.trust_network=3: give true or false"),
    ],
)
def test_a_wrong_value_of_our_own_keys_is_refused(key, value, said):
    with pytest.raises(ConfigError) as raised:
        Manager(OmegaConf.create({"_target_": f"{__name__}.Anything", key: value}))
    assert str(raised.value) == said


def test_variables_of_the_environment_give_texts():
    given = {"wait_timeout_s": "5", "keep": "false"}
    manager = Manager(OmegaConf.create({"_target_": f"{__name__}.Anything", **given}))
    assert (manager.wait_timeout_s, manager.keep) == (5.0, False)


def test_a_class_gets_plain_python_values_and_what_its_signature_names():
    cfg = OmegaConf.create(
        {"_target_": f"{__name__}.Anything", "n_workers": 3, "keep": True, "options": {"a": [1, {"b": 2}]}}
    )
    sys.modules.setdefault(__name__, sys.modules[Anything.__module__])
    given = Manager(cfg).open().given
    assert given == {"n_workers": 3, "shutdown_on_close": True, "options": {"a": [1, {"b": 2}]}}
    assert type(given["options"]["a"]) is list


class Grasping:
    """Replaces signal handlers, as some packages do."""

    def __init__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def test_signal_handlers_stay_ours_whatever_a_cluster_does_when_it_starts():
    sys.modules.setdefault(__name__, sys.modules[Grasping.__module__])
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Manager(OmegaConf.create({"_target_": f"{__name__}.Grasping"})).open()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


CTRL_C = """
import signal
from omegaconf import OmegaConf
from ddp_hydra.cluster.kinds.services import Slurm
manager = Slurm(OmegaConf.create({"_target_": "dask_jobqueue.SLURMCluster"}))
assert "queue" in manager.accepted or "job_cls" in manager.accepted, manager.accepted
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.integration
@pytest.mark.slow
def test_ctrl_c_stays_ours_whatever_a_package_does_when_it_is_imported():
    subprocess.run([sys.executable, "-c", CTRL_C], check=True)
