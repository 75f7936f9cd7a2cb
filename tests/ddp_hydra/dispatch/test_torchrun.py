from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config.schema import Config, Handler
from ddp_hydra.dispatch import torchrun
from ddp_hydra.errors import ConfigError, DdpHydraError

TORCHRUN = OmegaConf.create({"_target_": "ddp_hydra.dispatch.torchrun.Torchrun"})
LOCAL = OmegaConf.create({"_target_": "distributed.LocalCluster"})


MORE = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def clean(monkeypatch) -> None:
    for name in (*torchrun.NEEDED, *MORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["ddp_hydra", "seed=1"])


@pytest.fixture
def started(monkeypatch):
    """Be a process of a launcher."""

    def start(rank: int, **more: str) -> None:
        values = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "MASTER_ADDR": "h", "MASTER_PORT": 1, **more}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return start


def test_the_place_is_what_the_launcher_says(started):
    started(3, LOCAL_WORLD_SIZE="2", GROUP_RANK="1")
    spec = torchrun.place(TORCHRUN)
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_world_size, spec.node_rank) == (3, 4, 1, 2, 1)
    assert spec.nodes == 2


def test_without_a_launcher_jobs_start_their_ranks():
    assert torchrun.place(LOCAL) is None
    assert torchrun.arguments(["a=1"]) == ["a=1"]


def test_only_rank_0_has_a_run_directory(started):
    started(0)
    assert torchrun.arguments(["a=1"]) == ["a=1"]
    started(1)
    assert torchrun.arguments(["a=1"]) == ["a=1", *torchrun.NO_FOLDER]


def test_variables_that_are_missing_are_named_with_what_to_type(started, monkeypatch):
    with pytest.raises(ConfigError, match=r"RANK, .*MASTER_PORT are not set here: type torchrun .* ddp_hydra seed=1$"):
        torchrun.place(TORCHRUN)
    started(1)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="but MASTER_ADDR is not set here"):
        torchrun.place(TORCHRUN)


def test_what_starts_ranks_itself_does_not_go_with_a_launcher(started):
    started(0)
    with pytest.raises(ConfigError, match=r"rank 0 of 4 .* cluster distributed\.LocalCluster starts ranks itself"):
        torchrun.place(LOCAL)
    with pytest.raises(ConfigError, match="a sweep starts its jobs itself"):
        torchrun.arguments(["-m", "seed=1,2"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_workers": 2}, r"cluster.n_workers=2, but torchrun has started 4 ranks: give it --nproc-per-node 2, or"),
        ({"keep": True}, r"cluster.keep=true: cluster=torchrun has no cluster that could be kept"),
        ({"pip": ["pytest", "not-there>=1"]}, r"lacks: not-there>=1 \(not installed\): .* pip install 'not-there>=1'$"),
        (
            {"address": "tcp://h:1"},
            r"cluster.address: cluster=torchrun has no such key, .* n_workers, wait_timeout_s, keep",
        ),
        ({"pip": ["=1"]}, r"cluster.pip names '=1', which is not a requirement"),
    ],
)
def test_the_keys_of_every_cluster_are_held_against_what_was_started(started, given, said):
    started(0)
    fits = {"n_workers": 4, "wait_timeout_s": 5, "keep": False, "pip": ["pytest"]}
    assert torchrun.place(OmegaConf.merge(TORCHRUN, fits)) is not None
    with pytest.raises(DdpHydraError, match=said):
        torchrun.place(OmegaConf.merge(TORCHRUN, given))


def test_what_is_no_number_is_refused(started):
    started(0, WORLD_SIZE="all")
    with pytest.raises(ConfigError, match=r"must be whole numbers: .*'all'"):
        torchrun.place(TORCHRUN)


# -- restarts ----------------------------------------------------------------------------------------------


@pytest.fixture
def agent(started, monkeypatch, tmp_path) -> Path:
    """Be rank 0 of an agent that has started its ranks twice; return the run directory that the first ones noted."""
    for attempt in range(2):
        started(0, TORCHELASTIC_RESTART_COUNT=str(attempt), TORCHELASTIC_ERROR_FILE=str(error_file(tmp_path, attempt)))
        error_file(tmp_path, attempt).parent.mkdir(parents=True)
        if attempt == 0:
            torchrun.remember(str(tmp_path / "it's a\\run"))
    return tmp_path / "it's a\\run"


def error_file(folder: Path, attempt: int) -> Path:
    return folder / "logs" / "none_x1" / f"attempt_{attempt}" / "0" / "error.json"


def test_a_restart_goes_on_in_the_same_run_directory(agent):
    typed = ["seed=1", "hydra.run.dir=mine", "resume=other"]
    quoted = f"'{agent.parent}/it\\'s a\\run'"
    nothing_saved = torchrun.arguments(typed)
    assert nothing_saved == ["seed=1", "resume=other", f"hydra.run.dir={quoted}"]
    (agent / "checkpoints").mkdir(parents=True)
    (agent / "checkpoints" / "last.pt").write_bytes(b"a checkpoint")
    assert torchrun.arguments(typed) == ["seed=1", f"resume={quoted}", f"hydra.run.dir={quoted}"]
    assert torchrun.restart_count() == 1


def test_other_ranks_note_the_run_directory_and_use_it_only_as_rank_0(agent, started):
    started(1)
    assert torchrun.arguments(["a=1"]) == ["a=1", *torchrun.NO_FOLDER]
    started(2)  # the first of its host
    torchrun.remember("/elsewhere")
    assert torchrun.remembered() == Path("/elsewhere")
    started(3)
    torchrun.remember("/nowhere")
    assert torchrun.remembered() == Path("/elsewhere")


def test_without_an_agent_nothing_is_noted(started):
    started(0)
    torchrun.remember("/nowhere")
    assert torchrun.arguments(["a=1"]) == ["a=1"]
    assert torchrun.restart_count() == 0


# -- what needs Dask ---------------------------------------------------------------------------------------


def test_keys_without_effect_are_told_by_rank_0_with_what_has_one(started, caplog):
    started(0, LOCAL_WORLD_SIZE="2")
    cfg = OmegaConf.structured(Config)
    spec = torchrun.place(TORCHRUN)
    assert spec is not None
    with caplog.at_level(logging.WARNING):
        torchrun.check_job(cfg, spec)
    assert not caplog.records
    cfg.dispatch.max_restarts, cfg.dispatch.hang_timeout_s = 7, 5.0
    torchrun.check_job(cfg, spec)
    (told,) = caplog.messages
    assert told.startswith("dispatch.max_restarts=7 has no effect with cluster=torchrun: ")
    assert told.endswith("--max-restarts")
    cfg.dispatch.ranks_per_worker = 2
    torchrun.check_job(cfg, spec)
    assert caplog.messages[-1].endswith("--nproc-per-node")
    before = len(caplog.records)
    started(1)
    torchrun.check_job(cfg, torchrun.place(TORCHRUN))
    assert len(caplog.records) == before


def test_what_needs_a_dask_cluster_is_refused(started):
    started(0)
    spec = torchrun.place(TORCHRUN)
    cfg = OmegaConf.structured(Config)
    cfg.dispatch.ranks = 2
    with pytest.raises(ConfigError, match=r"dispatch\.ranks=2, but torchrun has started 4 ranks"):
        torchrun.check_job(cfg, spec)
    cfg = OmegaConf.structured(Config)
    cfg.results.handler = Handler.cluster
    with pytest.raises(ConfigError, match=r"results.handler=cluster: .*results.mirror=s3://bucket/folder"):
        torchrun.check_job(cfg, spec)
