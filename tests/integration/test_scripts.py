"""Scripts that know nothing of ddp_hydra, unchanged on the ranks of a gang."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from ddp_hydra import dispatch
from ddp_hydra.errors import ConfigError, RankFailed

pytestmark = pytest.mark.integration

TORCH = """
import argparse, json, os, pathlib
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--steps", type=int)
args = parser.parse_args()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("rank", dist.get_rank(), "trains")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    result = {"weights": model.module.weight.tolist(), "world_size": dist.get_world_size(), "file": __file__}
    (args.out / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    raise SystemExit(0)
"""

LIGHTNING = """
import json, os, pathlib, sys
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

lightning.seed_everything(1 + int(os.environ["RANK"]), verbose=False)
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **off)
model = Model()
trainer.fit(model, data)
result = {"weights": model.layer.weight.tolist(), "world_size": trainer.world_size, "steps": trainer.global_step}
result["environment"] = type(trainer.strategy.cluster_environment).__name__
pathlib.Path(sys.argv[1], f"{trainer.global_rank}.json").write_text(json.dumps(result))
"""

ACCELERATE = """
import json, pathlib, sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
steps = 0
for (batch,) in data:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    steps += 1
weights = accelerator.unwrap_model(model).weight.tolist()
result = {"weights": weights, "world_size": accelerator.num_processes, "steps": steps}
pathlib.Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(result))
accelerator.end_training()
"""


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def run(client: Client, folder: Path, text: str, *args: object) -> list[dict[str, Any]]:
    """Run a script; returns what each rank has written."""
    script = folder / "train.py"
    script.write_text(text)
    (folder / "out").mkdir()
    assert dispatch.run(client, dispatch.script(script, folder / "out", *args)) == [None, None]
    return [json.loads((folder / "out" / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_script_of_plain_torch_makes_its_own_group(client2, tmp_path, capfd):
    first, second = run(client2, tmp_path, TORCH, "--steps", 3)
    assert "\nrank 0 trains\n" in capfd.readouterr().out
    assert first == second
    assert (first["world_size"], first["file"]) == (2, str(tmp_path / "train.py"))


@needs("lightning")
@pytest.mark.slow
def test_a_lightning_script_takes_the_ranks_for_torchruns(client2, tmp_path):
    first, second = run(client2, tmp_path, LIGHTNING)
    assert first == second
    assert (first["world_size"], first["steps"], first["environment"]) == (2, 4, "TorchElasticEnvironment")


@pytest.mark.slow
@needs("accelerate")
def test_an_accelerate_script(client2, tmp_path):
    first, second = run(client2, tmp_path, ACCELERATE)
    assert first == second
    assert (first["world_size"], first["steps"]) == (2, 4)


@pytest.mark.slow
@needs("lightning")
@pytest.mark.parametrize("group", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_trainer_inside_a_function_works_with_and_without_a_group(client2, gang, group):
    def fit() -> tuple[list[Any], int]:
        import lightning
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, TensorDataset

        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def training_step(self, batch, index):
                return self.layer(batch[0]).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        assert dist.is_initialized() is group
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, **off)
        model = Model()
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
        return model.layer.weight.tolist(), trainer.world_size

    first, second = gang(client2, group=group).run(fit)
    assert first == second
    assert first[1] == 2


def test_a_script_that_fails_is_told_with_its_own_lines(client2, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1':\n    raise ValueError('of its own')\n")
    with pytest.raises(RankFailed, match=r"rank 1 on .*ValueError: of its own(.|\n)*train\.py.*line 3"):
        dispatch.run(client2, dispatch.script(script))
    script.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RankFailed, match=r"exited with code 3"):
        dispatch.run(client2, dispatch.script(script))


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the script .*gone\.py can't be read \(No such file"):
        dispatch.script(tmp_path / "gone.py")
