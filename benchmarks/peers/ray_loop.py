"""Run the loop of `ddp_loop.py` with Ray Train: `python ray_loop.py ...`."""

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

    work = Work(**options, rank=get_context().get_world_rank(), world_size=RANKS)
    bare, data = work.build()
    model = prepare_model(bare, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    log = Log(work)
    for x, y in work.batches(data):
        logits = model(x)
        loss = loss_of(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.add(loss, logits, y)


def main() -> None:
    """Bring up Ray on this machine, and train."""
    from benchmarks.peers.loop_common import arguments

    options = vars(arguments())
    variables = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    ray.init(num_cpus=RANKS, include_dashboard=False, logging_level="error", runtime_env={"env_vars": variables})
    try:
        TorchTrainer(
            train,
            train_loop_config=options,
            scaling_config=ScalingConfig(num_workers=RANKS),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=str(Path(options["metrics"]).parent)),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
