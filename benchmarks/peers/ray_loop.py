"""Runs the loop of `ddp_loop.py` with Ray Train: `python ray_loop.py ...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

RANKS = 2
ROOT = str(Path(__file__).resolve().parents[2])


def train(options: dict[str, Any]) -> None:
    """Train, on each of Ray's workers."""
    sys.path.insert(0, ROOT)
    from benchmarks.peers.loop_common import Log, Work, loss_of

    work = Work(**options, rank=get_context().get_world_rank(), world_size=get_context().get_world_size())
    bare, data = work.build()
    model = prepare_model(bare, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    log, scaler = Log(work), work.scaler()
    for x, y in work.batches(data):
        with work.autocast():
            logits = model(x)
            loss = loss_of(logits, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.add(loss, logits, y)


def main() -> None:
    """Bring up Ray on this machine, unless RAY_ADDRESS names one, and train."""
    from benchmarks.peers.loop_common import arguments

    options = vars(arguments())
    on_gpu = options["device"] == "cuda"
    ranks = 1 if options["crops"] else RANKS
    variables = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    own: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": ranks, "include_dashboard": False}
    ray.init(**own, logging_level="error", runtime_env={"env_vars": variables})
    try:
        TorchTrainer(
            train,
            train_loop_config=options,
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=on_gpu),
            torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
            run_config=RunConfig(storage_path=str(Path(options["metrics"]).parent)),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
