"""Search with Ray Tune's ASHA: `python tune_asha.py <folder> <json of the search>`; writes result.json there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler


def train(config: dict[str, Any]) -> None:
    """Train one trial, and report after each epoch. The loop by hand, on tensors in memory, without checkpoints."""
    from benchmarks.workloads import DigitVectors
    from models.mlp import MLP

    torch.set_num_threads(1)
    torch.manual_seed(0)
    search, trial = config["search"], config["trial"]
    data, val = DigitVectors("train"), DigitVectors("val")
    model = MLP(64, 10, width=search["width"], dropout=trial["dropout"])
    optimizer = torch.optim.SGD(model.parameters(), lr=trial["lr"], momentum=0.9, fused=True)
    size = search["batch_size"]
    for epoch in range(search["epochs"]):
        order = torch.randperm(len(data))
        model.train()
        for begin in range(0, len(order) - size + 1, size):
            x, y = data.__getitems__(order[begin : begin + size].tolist())
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = (model(val.x).argmax(1) == val.y).float().mean().item()
        tune.report({"val_accuracy": found, "epochs": epoch + 1})


def main(folder: Path, search: dict[str, Any]) -> None:
    """Bring up Ray on this machine, and search."""
    ray.init(num_cpus=search["at_once"], include_dashboard=False, logging_level="error")
    try:
        tuner = tune.Tuner(
            train,
            param_space={"search": search, "trial": tune.grid_search(search["trials"])},
            tune_config=tune.TuneConfig(
                metric="val_accuracy",
                mode="max",
                scheduler=ASHAScheduler(
                    time_attr="epochs", max_t=search["epochs"], grace_period=1, reduction_factor=search["reduction"]
                ),
            ),
            run_config=tune.RunConfig(storage_path=str(folder), name="tune", verbose=0),
        )
        results = tuner.fit()
        best = results.get_best_result()
        found = {
            "best": best.config["trial"],
            "best_value": best.metrics["val_accuracy"],
            "epochs": [result.metrics.get("epochs", 0) for result in results],
        }
        (folder / "result.json").write_text(json.dumps(found))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
