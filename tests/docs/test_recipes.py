"""The recipes of docs/recipes.md: each is run as a reader would type it, on the session's cluster."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddp_hydra
from ddp_hydra.cli.main import COMMANDS
from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler
from tests.docs.blocks import ROOT, Block, after_program, blocks
from tests.support.s3_server import KEYS, png, s3  # noqa: F401  fixtures

pytestmark = [pytest.mark.integration, pytest.mark.medium]
PAGE = ROOT / "docs" / "recipes.md"
BASE = "The project of these recipes"
QUICK = ("trainer.threads=1", "trainer.log_every_steps=1", "dispatch.max_restarts=0", "trainer.epochs=2")
MADE = "outputs/<date>/<time>"


def recipes() -> dict[str, list[Block]]:
    """The blocks of the page by the headings above them."""
    heads = [(number, line[3:]) for number, line in enumerate(PAGE.read_text().splitlines(), 1) if line[:3] == "## "]
    found: dict[str, list[Block]] = {name: [] for _, name in heads}
    for block in blocks():
        if ROOT / block.page == PAGE:
            found[[name for number, name in heads if number < block.line][-1]].append(block)
    return found


RECIPES = recipes()


class Typed:
    """Runs what a reader types in the project's folder.

    Args:
        folder: of the project.
        address: of the cluster's scheduler.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address, self.run, self.made = folder, address, None, "base"

    def recipe(self, name: str) -> None:
        for block in RECIPES[name]:
            self.block(block)

    def block(self, block: Block) -> None:
        if block.mark.startswith("python"):
            text = block.text.replace("tcp://scheduler:8786", self.address).replace(MADE, self.made)
            space: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(text, block.where, "exec"), space)
            if "client" in space:
                space["client"].close()
            self.run = space.get("run")
        elif block.mark.startswith("job"):
            for line in block.lines():
                self.line(line.replace(MADE, self.made), block.mark.partition(", ")[2].split())

    def line(self, line: str, more: list[str]) -> None:
        words = after_program(shlex.split(line))
        if words is None:
            if not line.startswith("export"):  # the test sets the variables
                subprocess.run(["bash", "-euc", line], cwd=self.folder, check=True)
        elif words[0] in COMMANDS:
            module, _, function = COMMANDS[words[0]].partition(".")
            getattr(importlib.import_module(f"ddp_hydra.cli.{module}"), function)(words[1:])
        else:
            number = len(list(self.folder.glob("run-*")))
            self.run = ddp_hydra.run([*QUICK, *words, *more, f"hydra.run.dir=run-{number}"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The project with the files of all recipes: one content, which a worker gets once."""
    made = tmp_path_factory.mktemp("recipes")
    for block in (block for several in RECIPES.values() for block in several):
        if block.mark.startswith("file "):
            path = made / block.mark.removeprefix("file ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    (made / "names.json").write_text(json.dumps([f"{chr(97 + n % 26)}{'e' * (n % 7)}" for n in range(180)]))
    return made


@pytest.fixture
def typed(folder, client2, monkeypatch) -> Iterator[Typed]:
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(folder)
    before = imported()
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    connect.use_existing(Scheduler(client2.scheduler.address))
    made = Typed(folder, client2.scheduler.address)
    if not (folder / "base").exists():
        made.block(next(block for block in RECIPES[BASE] if block.mark == "job"))
        made.run.dir.rename(folder / "base")
    yield made
    connect.use_existing(None)
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    """The modules of a project space that this process has imported."""
    return [name for name in sys.modules if name.partition(".")[0] in ("models", "data")]


@pytest.fixture
def photos(folder, png) -> dict[str, bytes]:  # noqa: F811
    return {f"{name}/{number}.png": png(red=9 * number) for name in ("cats", "dogs") for number in range(10)}


def last(typed: Typed, name: str) -> float:
    return typed.run.records()[-1][name]


def weighed(typed: Typed) -> None:
    first, base = (run.records()[0]["train/loss"] for run in (typed.run, ddp_hydra.Run("base")))
    assert first != base


def checkpoint(typed: Typed) -> dict[str, Any]:
    return torch.load(typed.run.dir / "checkpoints/last.pt", weights_only=True)


def rates(typed: Typed) -> None:
    assert [group["initial_lr"] for group in checkpoint(typed)["optimizer"]["param_groups"]] == [0.05, 0.01]


def unfrozen(typed: Typed) -> None:
    assert typed.run.summary["steps"] == 9
    assert [(stage["lr"], stage["patterns"]) for stage in checkpoint(typed)["unfrozen"]] == [(0.001, ["*"])]


def watched(typed: Typed) -> None:
    assert last(typed, "watch/norm") > 0
    assert {path.name for path in (typed.run.dir / "watch").iterdir()} == {"rank-0.txt", "rank-1.txt"}


def parts(typed: Typed) -> None:
    assert typed.run.records()[0].keys() >= {"train/head/loss"}
    assert typed.run.records()[1].keys() >= {"train/head/loss", "train/body/loss"}


def onnx(typed: Typed) -> None:
    import onnxruntime

    for name in ("model.onnx", "axes.onnx"):
        session = onnxruntime.InferenceSession(typed.folder / name)
        (given,) = session.get_inputs()
        for size in (1, 5):
            (scores,) = session.run(None, {given.name: np.zeros((size, 4), np.float32)})
            assert scores.shape == (size, 3)


CHECKS: dict[str, Callable[[Typed], Any]] = {
    "Class weights": weighed,
    "Parameter groups with rates of their own": rates,
    "A backbone that is trained from epoch 3 on": unfrozen,
    "A metric of your own": lambda typed: 0 <= last(typed, "val/missed") <= 1,
    "Numbers, texts and pictures of a callback": watched,
    "Log from anywhere": lambda typed: 0 < last(typed, "train/silent") < 1 and 0 < last(typed, "val/silent") < 1,
    "ONNX with dynamic axes": onnx,
    "Two optimizers": parts,
    "A stream that shares itself": lambda typed: typed.run.summary["samples"] == 640,
    "Resume on other machines": lambda typed: typed.run.summary["from_step"] == 6,
    "A notebook that trains on a cluster": lambda typed: 0 <= typed.run.objective <= 1,
}
SAYS = {
    "A test split": r"30 samples.*val/f1 0\.\d+.*val/confusion \[\[",
    "A script for torchrun, on a Dask cluster": "2 ranks, bias ",
    "`python -m module`": "rank 0 sells tulips",
}


def test_the_page_has_twenty_of_them():
    assert len(RECIPES) == 21
    assert {*CHECKS, *SAYS} <= RECIPES.keys()


APART = (BASE, "An S3 server of your own", "Several hosts by SSH")


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in APART])
def test_a_recipe_works(name, typed, photos, capsys):
    if "images" in name:
        for path, content in photos.items():
            (typed.folder / "photos" / path).parent.mkdir(parents=True, exist_ok=True)
            (typed.folder / "photos" / path).write_bytes(content)
    typed.recipe(name)
    assert CHECKS.get(name, lambda typed: None)(typed) is not False
    assert re.search(SAYS.get(name, ""), capsys.readouterr().out, re.DOTALL)


def test_the_recipe_of_an_s3_server_works(typed, photos, s3, monkeypatch, capsys):  # noqa: F811
    """In this process: workers that live already have other variables."""
    s3.client.create_bucket(Bucket="photos")
    s3.add("photos", {f"{part}/{path}": data for part in ("train", "val") for path, data in photos.items()})
    for variable, value in {**KEYS, "AWS_ENDPOINT_URL": s3.endpoint_url}.items():
        monkeypatch.setenv(variable, value)
    typed.recipe("An S3 server of your own")
    assert "dry run: all of it works" in capsys.readouterr().out
