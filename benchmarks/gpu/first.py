"""The demo, one and two ranks on a GPU, and the cluster of dask-cuda."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from benchmarks import report
from benchmarks.gpu.bench import SHORT, Bench, Missing, relative
from benchmarks.report import Figure, Goal

STEPS = ("trainer.max_steps=20", "trainer.epochs=null", "data.val=null", "optimizer.lr=0.1")
CLOSE = Goal(0.001, at_most=True)
"""Rounding, after twenty steps."""


def demo(bench: Bench) -> Iterator[Figure]:
    """Train what `make demo` trains: ResNet-18 on digits from an embedded S3 store."""
    ranks = min(bench.card.gpus or 2, 2)
    shorter = () if bench.on_gpu else ("trainer.epochs=2",)
    job = bench.job("demo", "experiment=digits", *shorter, *bench.ranks(ranks))
    name = f"demo, {ranks} rank{'s' * (ranks > 1)}: val/accuracy"
    yield report.value(name, job.summary["metrics"]["val/accuracy"], bench.goal(0.9))
    yield report.value("demo: from the command to the prompt", job.seconds, unit="s")


def ranks(bench: Bench) -> Iterator[Figure]:
    """Train the same samples on one rank, and on two that share a GPU where there is only one."""
    one = bench.job("one-rank", *SHORT, *STEPS, "data.batch_size=64", *bench.ranks(1))
    two = bench.job("two-ranks", *SHORT, *STEPS, "data.batch_size=32", *bench.ranks(2))
    name = f"two ranks by {bench.backend}, against one: largest difference of the loss"
    yield report.value(name, relative(two.every("train/loss"), one.every("train/loss")), CLOSE, "of it")
    on_device = sum(f"on {bench.device}," in job.output for job in (one, two))
    yield report.value(f"jobs that say that they are on {bench.device}", on_device, Goal(2))


def dask_cuda(bench: Bench) -> Iterator[Figure]:
    """Train on `cluster=local_cuda`: a worker for each GPU."""
    if importlib.util.find_spec("dask_cuda") is None:
        raise Missing("needs dask-cuda: pip install 'ddp-hydra[gpu]'")
    settings, variables = ["cluster=local_cuda"], {}
    if not bench.on_gpu:  # dask-cuda's own way to start its workers without a driver
        settings, variables = (
            [*settings, "cluster.CUDA_VISIBLE_DEVICES=[0,1]"],
            {"DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC": "1"},
        )
    job = bench.job("dask-cuda", *SHORT, *STEPS, *settings, variables=variables)
    ranks = len(list((job.dir / "logs").glob("rank-*.log")))
    yield report.value("cluster=local_cuda: ranks that trained", ranks, Goal(bench.card.gpus or 2))
