"""By hand: a Hydra app for a sweep of short trainings, each in one process. Run by hydra-joblib-launcher."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

ROOT = Path(__file__).parents[2]


@hydra.main(version_base="1.3", config_path="conf", config_name="sweep_single")
def main(cfg: DictConfig) -> None:
    """Train; the same lines, files and times as sweep_ddp.py's."""
    sys.path += [str(ROOT)] if str(ROOT) not in sys.path else []  # not before: Hydra would find our launcher there
    import torch
    import torch.nn.functional as F

    from benchmarks.workloads import MLP, StampedSGD, Vectors

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    folder = Path(HydraConfig.get().runtime.output_dir)
    data = Vectors(cfg.samples)
    model = MLP(data.num_classes)
    optimizer = StampedSGD(model.parameters(), cfg.lr, str(folder / "first-step"))
    order = torch.randperm(len(data))
    begin = time.perf_counter()

    with (folder / "metrics.jsonl").open("w", buffering=1) as metrics:
        for step in range(1, cfg.steps + 1):
            x, y = data.__getitems__(order[(step - 1) * cfg.batch_size : step * cfg.batch_size].tolist())
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(json.dumps({"step": step, "loss": loss.item()}), file=metrics)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
    (folder / "summary.json").write_text(json.dumps({"train_s": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
