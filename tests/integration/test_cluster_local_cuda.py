"""A job on dask-cuda's cluster, on the CPU: `make test-dask-cuda` installs dask-cuda with the Dask that it pins."""

from __future__ import annotations

import inspect
import json
import os
import sys
from unittest import mock

import pytest

from tests.integration.conftest import CommandLine

dask_cuda = pytest.importorskip("dask_cuda", reason="needs dask-cuda: make test-dask-cuda")

pytestmark = pytest.mark.integration

WITHOUT_GPU = {"DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC": "1"}
"""With this variable, dask-cuda starts its workers where the driver shows no GPU."""


def test_a_job_runs_on_its_workers(cli: CommandLine):
    settings = ("cluster=local_cuda", "cluster.CUDA_VISIBLE_DEVICES=[0,1]", "trainer.device=cpu")
    ended = cli.done(*settings, "data=tiny", "model=tiny", "trainer.epochs=1", "hydra.run.dir=run", **WITHOUT_GPU)
    assert "2 on cpu" in ended.stdout + ended.stderr
    assert json.loads((cli.folder / "run" / "summary.json").read_text())["status"] == "done"


def test_each_worker_has_its_own_gpu_first_and_no_memory_limit(monkeypatch):
    from distributed import Client

    from tests.ddp_hydra.cluster.test_connect import manager

    chosen = manager("local_cuda", "cluster.CUDA_VISIBLE_DEVICES=[0,1]")
    monkeypatch.setattr("ddp_hydra.rank.environment.count", lambda: 2)
    chosen.check()

    def look(dask_worker):
        manager = dask_worker.memory_manager
        placed = "dask_cuda" in sys.modules
        return os.environ["CUDA_VISIBLE_DEVICES"], placed, manager.memory_limit, type(dask_worker.data).__name__

    # It and Dask's nannies set variables of this process.
    with mock.patch.dict(os.environ, WITHOUT_GPU), chosen.open() as cluster, Client(cluster) as client:
        seen = sorted(client.run(look).values())
        specs = [spec["options"] for spec in cluster.worker_spec.values()]
    assert seen == [("0,1", True, None, "dict"), ("1,0", True, None, "dict")]
    assert [spec["preload"] for spec in specs] == [["ddp_hydra.rank.dask_preload", "dask_cuda.initialize"]] * 2


def test_the_signature_that_other_tests_assume_is_that_of_dask_cuda():
    from tests.ddp_hydra.cluster.test_connect import DASK_CUDA_TAKES

    assert set(DASK_CUDA_TAKES) <= set(inspect.signature(dask_cuda.LocalCUDACluster).parameters)
