"""Sixty ordinary mistakes: docs/mistakes.md is made of them, and test_mistakes.py makes them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """Describe a mistake.

    Args:
        what: it is, for the page.
        typed: words behind `ddp-hydra`, or lines of Python.
        files: name -> text, in the project's folder.
        is_early: words alone tell it, so no cluster is started.
    """

    what: str
    typed: str
    files: dict[str, str] = field(default_factory=dict)
    is_early: bool = True


def model(forward: str, init: str = "", name: str = "Net") -> dict[str, str]:
    text = f"""import torch
from torch import nn


class {name}(nn.Module):
    def __init__(self, num_classes, width=8, depth=1):
        super().__init__()
        self.layer = nn.Linear(2, num_classes){init}

    def forward(self, x):
        return {forward}
"""
    return {"models/net.py": text}


def data(item: str) -> dict[str, str]:
    text = f"""import torch


class Points(torch.utils.data.Dataset):
    classes = ["left", "middle", "right"]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {item}
"""
    val = "{_target_: data.points.Points}"
    return {"data/points.py": text, "conf/data/points.yaml": f"batch_size: 8\ntrain: {val}\nval: {val}\n"}


def late(what: str, typed: str, files: dict[str, str] | None = None) -> Mistake:
    return Mistake(what, typed, files or {}, is_early=False)


NET = "model._target_=models.net.Net"
WORDS = [
    Mistake("An option that is not there", "model=resnet19"),
    Mistake("A key of another name", "optimizer.learning_rate=0.1"),
    Mistake("A key without its group", "lr=0.1"),
    Mistake("Options as other programs have them", "--epochs 3"),
    Mistake("A command that is none", "train optimizer.lr=0.1"),
    Mistake("A misspelt command", "evalute run=outputs/mine"),
    Mistake("A text for a number", "trainer.epochs=three"),
    Mistake("A choice that is not there", "trainer.precision=int8"),
    Mistake("A number out of range", "data.batch_size=-4"),
    Mistake("An interpolation of nothing", "'optimizer.lr=${base_lr}'"),
]
FILES = [
    Mistake("A syntax error in a model's file", NET, {"models/net.py": "class Net(nn.Module)\n    pass\n"}),
    Mistake("A package that is not installed", NET, {"models/net.py": "import einopss\n\n\nclass Net: ...\n"}),
    Mistake(
        "A module outside of models/",
        NET,
        {"models/net.py": "import helpers\n\n\nclass Net: ...\n", "helpers.py": "width = 3\n"},
    ),
    Mistake(
        "A YAML file with a tab, or a bracket that is open",
        "data=mine",
        {"conf/data/mine.yaml": "batch_size: 8\ntrain: [1\n"},
    ),
    Mistake("An experiment without a file", "experiment=basline", {"conf/experiment/baseline.yaml": "seed: 1\n"}),
    late("A folder of images that is not there", "data=s3_photos data.bucket=../photos model=resnet18"),
    late("A Parquet file that is not there", "data=parquet_rows data.files=rows.parquet data.val=null data.target=y"),
    Mistake("A folder of a bucket as its name", "data=s3_photos data.bucket=s3://photos/train model=resnet18"),
    Mistake("A run that is not there", "resume=outputs/mine"),
    Mistake("A resume of a file that is no checkpoint", "resume=notes.txt", {"notes.txt": "no checkpoint\n"}),
]
SHAPES = [
    late("A first layer of another width", NET, model("self.layer(x)", "\n        self.layer = nn.Linear(3, 8)")),
    late("A model with fewer outputs than there are classes", f"{NET} model.num_classes=2", model("self.layer(x)")),
    late("A model that returns a dict", NET, model('{"logits": self.layer(x)}')),
    late("A model that forgets its return", NET, model("None")),
    late("Class weights for another number of classes", "+loss.weight=[1,2]"),
    late("Samples of different sizes", "data=points", data("torch.zeros(2 + index % 3), 0")),
    late("Labels that are texts", "data=points", data('torch.zeros(2), "left"')),
    late("Labels out of range", "data=points", data("torch.zeros(2), 3")),
    late("A batch that is a dict", "data=points", data('{"x": torch.zeros(2), "y": 0}')),
    late("Fewer samples than a batch has", "data=points data.batch_size=100", data("torch.zeros(2), 0")),
]
NAMES = [
    Mistake("A misspelt class", "model._target_=models.mlp.MPL"),
    Mistake("A misspelt module", "model._target_=models.mpl.MLP"),
    late("An argument that the model does not take", "+model.widht=3"),
    late("A metric that nothing computes", "objective.metric=val/acc"),
    late("A part of the model that is not there", "'trainer.freeze=[backbone.*]'"),
    late("A loss of torch that is not there", "loss._target_=torch.nn.CrossEntropy"),
    late("An optimizer of torch that is not there", "optimizer._target_=torch.optim.AdamWW"),
    Mistake("A logger that is not there", "'results.loggers=[wandbb]'"),
    Mistake("A key that is removed and is not there", "'~model.classes'"),
    Mistake("A run of another name", "evaluate run=outputs/frist", {"outputs/first/.hydra/config.yaml": "seed: 1\n"}),
]
CLUSTERS = [
    Mistake("A kind of cluster that is not there", "cluster=slrum"),
    Mistake("No workers", "cluster.n_workers=0"),
    Mistake("A key that the cluster has not", "cluster.workers=4"),
    Mistake("A scheduler without an address", "cluster=remote"),
    late("A scheduler that is not there", "cluster=remote cluster.address=tcp://127.0.0.1:9 cluster.wait_timeout_s=1"),
    Mistake("NCCL without GPUs", "dispatch.backend=nccl trainer.device=cpu"),
    Mistake("More ranks at least than at most", "dispatch.ranks=2 dispatch.min_ranks=4"),
    Mistake("Ports as a number", "dispatch.port_range=[40000]"),
    Mistake("Detached, without a place for the results", "detach=true"),
    Mistake(
        "A requirement that is none", "'cluster.pip=[\"torch=>2\"]' cluster=remote cluster.address=tcp://127.0.0.1:9"
    ),
]
PYTHON = [
    Mistake("Overrides as one text", 'ddp_hydra.run("optimizer.lr=0.1")'),
    Mistake("An option of the command", 'ddp_hydra.run(["-m", "optimizer.lr=0.1,0.2"])'),
    Mistake("A misspelt key", 'ddp_hydra.run(["optimizer.lrr=0.1"])'),
    Mistake("A run directory that is not there", 'ddp_hydra.Run("outputs/mine")'),
    Mistake("The function's result in place of the function", "dispatch.run(client, print())"),
    Mistake("A file's name in place of a script", 'dispatch.run(client, "train.py")', {"train.py": "print(1)\n"}),
    Mistake(
        "Arguments of a script given to run",
        'dispatch.run(client, dispatch.script("train.py"), "--epochs", 2)',
        {"train.py": "print(1)\n"},
    ),
    Mistake("Settings of the gang", "def train(lr): ...\n\n\ndispatch.run(client, train, lr=0.1, max_restarts=2)"),
    Mistake("An async function", "async def train(): ...\n\n\ndispatch.run(client, train)"),
    late(
        "An error in a function of a cell",
        "def train():\n    return [1, 2][5]\n\n\ndispatch.Gang(client, ranks=1).run(train)",
    ),
]
CHAPTERS = {
    "Words": WORDS,
    "Files": FILES,
    "Shapes": SHAPES,
    "Names": NAMES,
    "Clusters": CLUSTERS,
    "Notebooks and Python": PYTHON,
}
