"""One cluster of three workers for all properties, and jobs on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from distributed import Client

import ddp_hydra
from ddp_hydra.api import StartedRun
from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler
from tests.integration.conftest import functions_travel_by_value, no_rank_left, project_at, started  # noqa: F401  fixtures
from tests.support.warm_server import shared_client

PROJECT = Path(__file__).parent / "project"
QUIET = ("trainer.threads=1", "dispatch.restart_wait_s=5")


@pytest.fixture(scope="session")
def client3(warm_server) -> Iterator[Client]:
    with shared_client(3) as client:
        yield client


@pytest.fixture(scope="session")
def by_hand() -> ModuleType:
    """The module of the project's models and data, for the loop by hand."""
    spec = importlib.util.spec_from_file_location("exact_by_hand", PROJECT / "models" / "exact.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(client3, tmp_path, monkeypatch) -> Iterator[Callable[..., StartedRun]]:
    """Run a job of the project on the cluster; each call has a run directory of its own."""
    monkeypatch.chdir(tmp_path)
    connect.use_existing(Scheduler(client3.scheduler.address))
    count = 0

    def job(*overrides: str) -> StartedRun:
        nonlocal count
        count += 1
        return ddp_hydra.run([*QUIET, *overrides, f"hydra.run.dir={tmp_path / str(count)}"])

    with project_at(PROJECT):
        yield job
    connect.use_existing(None)
