"""Jobs on one GPU: what differs from the CPU. `pytest -m gpu` runs them where there is one."""

from __future__ import annotations

import json
import os
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hydra.dispatch import Gang
from ddp_hydra.training.parallel.weights import Ema
from tests.integration.conftest import CommandLine, local_client
from tests.integration.test_exactness import assert_equal
from tests.integration.test_exactness import train as train

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

LOW = (
    "trainer.precision=fp16",
    "trainer.ema_decay=0.9",
    "trainer.clip_norm=0.5",
    "optimizer=adamw",
    "optimizer.lr=0.01",
)
"""All that keeps state of its own: loss scale, average, a fused optimizer."""


@pytest.fixture(scope="module")
def client(warm_server):
    with local_client(1) as client:
        yield client


INLINE = ("data=tiny", "model=tiny", "cluster=inline")


def beside(cli: CommandLine, name: str, text: str) -> dict[str, str]:
    """Write a module of one's own beside the project, and return the variables that let it be found."""
    (cli.folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(cli.folder), os.environ["PYTHONPATH"]])}


def test_a_rank_has_the_gpu_to_itself_and_leaves_nothing_on_it(client):
    def look() -> dict[str, Any]:
        bad_fork, touched = torch.cuda._is_in_bad_fork(), torch.zeros(2**28, device="cuda")  # 1 GiB
        return {"bad_fork": bad_fork, "sum": float(touched.sum()), "free": torch.cuda.mem_get_info()[0]}

    first, *others = [Gang(client).run(look)[0] for _ in range(3)]
    assert (first["bad_fork"], first["sum"]) == (False, 0.0)
    assert all(abs(other["free"] - first["free"]) < 2**26 for other in others), (first, others)


def test_a_rank_that_computes_on_the_cpu_does_not_open_the_gpu(client):
    def opened() -> bool:
        return torch.cuda.is_initialized()

    assert Gang(client, backend="gloo").run(opened) == [False]
    assert Gang(client, backend="auto").run(opened) == [True]


@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_a_step_waits_for_nothing_but_the_vote(cli, ema):
    """Counted by torch itself: whatever waits for the GPU warns, between the first steps and the next log."""
    ended = cli.done(
        *INLINE, "model._target_=watch.Watched", "trainer.max_steps=12", "trainer.log_every_steps=100",
        f"trainer.ema_decay={ema}", **beside(cli, "watch", WATCH),
    )  # fmt: skip
    assert "watched 6 steps" in ended.stdout + ended.stderr
    assert "synchronizing CUDA operation" not in ended.stdout + ended.stderr


WATCH = """
import torch
from models.tiny import Tiny

class Watched(Tiny):
    calls = 0
    def forward(self, x):
        if self.training:
            type(self).calls += 1
            if self.calls == 4:
                torch.cuda.set_sync_debug_mode("warn")
            if self.calls == 10:
                torch.cuda.set_sync_debug_mode("default")
                print("watched 6 steps", flush=True)
        return super().forward(x)
"""


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(client, train, name):
    settings = (
        *LOW,
        f"trainer.precision={name}",
        "model.dropout=0.5",
        "trainer.epochs=2",
        "trainer.checkpoint_every_steps=4",
    )
    whole = train(client, "whole", *settings, ranks=1)
    resumed = train(client, "resumed", *settings, ranks=1, resume=whole.folder / "checkpoints" / "step-000004.pt")
    assert_equal(resumed.checkpoint("last.pt"), whole.checkpoint("last.pt"))
    assert [line for line in resumed.metrics("peak_memory") if line["step"] > 4] == [
        line for line in whole.metrics("peak_memory") if line["step"] > 4
    ]


def test_an_overflow_of_fp16_lowers_the_scale_and_a_loss_of_nan_is_skipped(client, train):
    skipping = ("trainer.on_nonfinite=skip", "faults=['nan,rank=0,step=6']", "trainer.log_every_steps=1")
    run = train(client, "run", *LOW, "loss=cross_entropy", "trainer.epochs=2", *skipping, ranks=1)
    scales = [line["loss_scale"] for line in run.metrics() if "loss_scale" in line]
    assert all(value.isfinite().all() for value in run.checkpoint("last.pt")["model"].values())
    assert len(scales) >= 20
    assert scales[-1] <= 2**16


@pytest.mark.parametrize("mode", ["default", "reduce_overhead"])
def test_compiled_models_accumulate_beside_threads_that_pin_memory(client, train, mode):
    settings = ("trainer.gradient_accumulation_steps=2", "data.batch_size=4", "trainer.epochs=1")
    plain = train(client, "plain", *settings, ranks=1)
    compiled = train(client, "compiled", *settings, f"trainer.compile={mode}", ranks=1)
    losses = [[line["train/loss"] for line in run.metrics() if "train/loss" in line] for run in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_full_gpu_is_explained(cli):
    mine = beside(cli, "huge", HUGE)
    ended = cli.run(*INLINE, "model._target_=huge.Huge", "trainer.max_steps=2", **mine)
    assert ended.returncode == 1
    assert re.search(r"no memory left on cuda:0 in step 1, phase forward: .*data\.batch_size=4", ended.stderr), (
        ended.stderr
    )
    assert "Traceback" not in ended.stderr


HUGE = """
import torch
from models.tiny import Tiny

class Huge(Tiny):
    def forward(self, x):
        torch.empty(2**42, device=x.device)
        return super().forward(x)
"""


def test_a_checkpoint_of_more_than_two_gigabytes_is_copied_beside_the_training(cli):
    mine: dict[str, Any] = {"timeout_s": 200, **beside(cli, "wide", WIDE)}
    settings = (*INLINE, "model._target_=wide.Wide", "trainer.checkpoint_every_steps=2", "trainer.max_steps=4")
    cli.done(*settings, "hydra.run.dir=run", **mine)
    assert (cli.folder / "run" / "checkpoints" / "last.pt").stat().st_size > 2 * 2**30
    cli.done(*settings, "resume=run/checkpoints/step-000002.pt", "hydra.run.dir=again", **mine)
    one, other = (
        torch.load(cli.folder / name / "checkpoints" / "last.pt", weights_only=True)["model"]
        for name in ("run", "again")
    )
    assert_equal(one, other)


WIDE = """
import torch
from torch import nn
from models.tiny import Tiny

class Wide(Tiny):
    def __init__(self, num_classes, **others):
        super().__init__(num_classes)
        self.wide = nn.Parameter(torch.ones(600_000_000))

    def forward(self, x):
        return super().forward(x) * self.wide[: len(x), None].sigmoid() + self.wide[-1]
"""


def test_the_average_never_asks_the_gpu():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    ema = Ema(model, 0.9)
    ema.update(model)
    with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        ema.update(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_summary_counts_each_jobs_own_peak(cli):
    peaks = []
    for width in (64, 1):
        cli.done(
            "data=tiny",
            "model=tiny",
            f"data.batch_size={width}",
            "cluster=inline",
            "trainer.max_steps=1",
            f"hydra.run.dir={width}",
        )
        peaks.append(json.loads((cli.folder / str(width) / "summary.json").read_text())["peak_memory"])
    assert 0 < peaks[1] <= peaks[0]
