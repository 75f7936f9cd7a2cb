from __future__ import annotations

import pytest

from ddp_hydra import __main__ as command
from ddp_hydra.config import project
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import fork_client, torchrun
from ddp_hydra.rank.processes import RANK_PID


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(project.VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("line", "is_likely"),
    [
        ("", True),
        ("model=resnet18 cluster.n_workers=4 trainer.max_steps=3", True),
        ("-m optimizer.lr=0.1,0.2", True),
        ("cluster=local", True),
        ("--help", False),
        ("--cfg job model=resnet18", False),
        ("attach outputs/x", False),
        ("cluster=remote cluster.address=tcp://x:1", False),
        ("dry_run=true", False),
        ("-m hydra/launcher=joblib", False),
        ("hydra.job.env_set.OMP_NUM_THREADS=2", False),
    ],
)
def test_a_server_is_started_for_jobs_that_train_here(line, is_likely):
    assert command.is_likely(line.split()) is is_likely


@pytest.mark.parametrize(
    ("defaults", "is_likely"),
    [
        ("- job\n  - _self_", True),
        ("- job\n  - override cluster: slurm  # ours\n  - _self_", False),
        ("- cluster: local", True),
        ("- /cluster: remote", False),
    ],
)
def test_a_projects_own_choice_of_a_cluster_counts(tmp_path, defaults, is_likely):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(f"defaults:\n  {defaults}\n")
    assert command.is_likely(["model=mlp"]) is is_likely
    assert command.is_likely(["cluster=local"])


def test_none_is_started_where_the_project_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv(project.VARIABLE, "nowhere")
    assert not command.is_likely([])
    monkeypatch.delenv(project.VARIABLE)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_bytes(b"\xff\xfe\xfa")
    assert not command.is_likely([])


def test_a_process_of_torchrun_starts_one_for_its_own_cluster(monkeypatch):
    for name in torchrun.NEEDED:
        monkeypatch.setenv(name, "0")
    assert not command.is_likely([])
    assert not command.is_likely(["cluster=local"])
    assert command.is_likely(["cluster=torchrun"])
    monkeypatch.setenv(RANK_PID, "1")  # a program that a rank has started
    assert not command.is_likely(["cluster=torchrun"])


def test_a_server_is_held_where_a_job_is_likely(monkeypatch):
    calls = []
    monkeypatch.setattr(fork_client, "hold", lambda: calls.append("hold"))
    command.prestart(["--help"])
    assert calls == []
    command.prestart([])
    assert calls == ["hold"]

    def refuse() -> None:
        raise ConfigError("the folder belongs to somebody else")

    monkeypatch.setattr(fork_client, "hold", refuse)
    command.prestart([])  # the job says what is wrong


@pytest.mark.medium
def test_another_host_takes_the_cluster_of_a_run_and_of_configs_that_it_reaches(tmp_path, monkeypatch):
    monkeypatch.setattr(project, "make_importable", lambda roots: None)
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("- cluster=torchrun\n- cluster.trust_network=true\n")
    assert command.cluster_of(["resume=run", "seed=1"]).trust_network
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    (tmp_path / "own" / "cluster" / "ours.yaml").write_text("_target_: a.Cluster\n")
    for given in (["--config-dir", "own"], ["-cd", "own"], ["-cd=own"], [f"hydra.searchpath=[file://{tmp_path}/own]"]):
        assert command.cluster_of([*given, "cluster=ours"])._target_ == "a.Cluster"
    lacking = ["--config-dir=nowhere", "--config-name=mine", "resume=away", "cluster=torchrun", "cluster.n_workers=2"]
    assert command.cluster_of(lacking).n_workers == 2
