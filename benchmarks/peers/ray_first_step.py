"""Ray Train: the time from `fit` to the first step, on a Ray that is up. Prints the seconds as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

ROOT = str(Path(__file__).resolve().parents[2])
STARTS = 3
"""After the first one, which is not counted."""


def train(options: dict[str, Any]) -> None:
    """Do one step; rank 0 writes the time at which it was done."""
    sys.path.insert(0, ROOT)
    import torch.distributed as dist
    import torch.nn.functional as F

    from benchmarks.workloads import MLP, StampedSGD, Vectors

    data = Vectors(1024)
    model = prepare_model(MLP(data.num_classes))
    optimizer = StampedSGD(model.parameters(), 0.01, options["stamp"])
    x, y = data.__getitems__(list(range(dist.get_rank(), 32 * dist.get_world_size(), dist.get_world_size())))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def main(stamp: str, ranks: int) -> None:
    """Start the trainer again and again."""
    ray.init(logging_level="error", log_to_driver=False)
    took = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for _ in range(STARTS + 1):
            begin = time.time()
            TorchTrainer(
                train,
                train_loop_config={"stamp": stamp},
                scaling_config=ScalingConfig(num_workers=ranks),
                torch_config=TorchConfig(backend="gloo"),
                run_config=RunConfig(storage_path=folder),
            ).fit()
            took.append(float(Path(stamp).read_text()) - begin)
    ray.shutdown()
    print(json.dumps(took[1:]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
