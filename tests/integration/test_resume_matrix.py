"""What resumes into what: any checkpoint goes on in any layout. The table in docs/large-models.md is what is found.

`WRITE_MATRIX=1 python -m pytest tests/integration/test_resume_matrix.py -n 0` writes the table anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import training
from tests.integration.support.training import BLOCKS, Trained, learned
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "large-models.md"
KINDS = {
    "ddp 1": (1, ["parallel=ddp"]),
    "ddp 2": (2, ["parallel=ddp"]),
    "ddp 4": (4, ["parallel=ddp"]),
    "fsdp2 1": (1, ["parallel=fsdp2"]),
    "fsdp2 2": (2, ["parallel=fsdp2"]),
    "fsdp2 4": (4, ["parallel=fsdp2"]),
    "hsdp 2x2": (4, ["parallel=fsdp2", "parallel.replicas=2"]),
}
COMPILED = ["trainer.compile=default", "model.backend=eager"]
LAYOUTS = KINDS | {f"{kind} c": (ranks, [*words, *COMPILED]) for kind, (ranks, words) in KINDS.items()}
"""Ranks and settings. With `c`, the model is compiled, without a compiler: names in the state are those of inductor."""
SAVED, STEPS = 4, 6
LEARNS = (
    "model.over_batch=false",
    "model.tell=true",
    "trainer.ema_decay=0.9",
    f"trainer.checkpoint_every_steps={SAVED}",
    f"trainer.max_steps={STEPS}",
)
PRUNED = {"fsdp2 2 c": ("ddp 1",)}
"""The pairs that are not slow; test_checkpoints_in_parts.py has others."""
EXACT, CLOSE = "=", "≈"


def run_in(client: Any, project: Any, folder: Any, layout: str, *overrides: str, **options: Any) -> Trained:
    ranks, kind = LAYOUTS[layout]
    words = [*BLOCKS, *LEARNS, f"data.batch_size={12 // ranks}", *kind, *overrides]
    if "optimizer=gan_adam" in overrides:
        words.remove("optimizer.fused=false")
    return training.train(client, project, folder, *words, ranks=ranks, **options)


@pytest.fixture(scope="module")
def saved(client4, project, tmp_path_factory) -> Callable[..., Trained]:
    """A run of a layout that is not interrupted, with its checkpoint amid it."""
    runs: dict[tuple[str, ...], Trained] = {}

    def of(*words: str) -> Trained:
        if words not in runs:
            layout, *overrides = words
            runs[words] = run_in(client4, project, tmp_path_factory.mktemp("saved") / "run", layout, *overrides)
        return runs[words]

    return of


def goes_on(whole: Trained, resumed: Trained) -> str:
    """Compare what a resumed run did with what the run that saved did from there on; return how alike it is."""
    rest, lines = ([line for line in run.metrics() if line["step"] > SAVED] for run in (whole, resumed))
    assert [line["step"] for line in lines] == [line["step"] for line in rest] != []
    samples = whole.samples()
    assert resumed.samples() == samples[len(samples) * SAVED // STEPS :] != []
    for line, wanted in zip(lines, rest, strict=True):
        assert {"loss", "lr"} <= {name.rpartition("/")[2] for name in line} or "val/loss" in line
        assert line == pytest.approx(wanted, rel=1e-5)
    try:
        assert lines == rest
        assert_equal(learned(resumed), learned(whole))
    except AssertionError:
        return CLOSE
    return EXACT


def table() -> dict[str, dict[str, str]]:
    """The page's cells by the layout that saved, and the one that resumed."""
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in found().splitlines()]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def found() -> str:
    match = re.search(r"\| saved by.*?(?=\n\n)", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match, "the page has no table"
    return match[0]


def write(cells: dict[str, dict[str, str]]) -> None:
    head = f"| saved by | {' | '.join(LAYOUTS)} |\n| --- |{' --- |' * len(LAYOUTS)}"
    rows = [f"| {one} | {' | '.join(cells.get(one, {}).get(other, '') for other in LAYOUTS)} |" for one in LAYOUTS]
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(found(), "\n".join([head, *rows])), encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(one, other, marks=[] if other in PRUNED.get(one, ()) else pytest.mark.slow)
        for one in LAYOUTS
        for other in LAYOUTS
    ],
)
def test_any_checkpoint_goes_on_in_any_layout(client4, project, tmp_path, saved, source, target):
    whole = saved(source)
    file = whole.folder / "checkpoints" / f"step-{SAVED:06d}.pt"
    cell = goes_on(whole, run_in(client4, project, tmp_path / "run", target, resume=file))
    if source == target:
        assert cell == EXACT
    cells = table()
    if "WRITE_MATRIX" in os.environ:
        cells.setdefault(source, {})[target] = cell
        write(cells)
    assert cell in (EXACT, cells[source][target]), "WRITE_MATRIX=1 writes the table anew"


GROUPS = ("trainer.freeze=['stem.*','*.norm.*']", "trainer.decay_all=false", "optimizer.weight_decay=0.1")
IN_TURN = (
    "task._target_=models.blocks.InTurn",
    "optimizer=gan_adam",
    *(f"~optimizer.{name}" for name in ("generator", "discriminator")),
    *(
        f"+optimizer.{part}={{_target_: torch.optim.AdamW, lr: {lr}, fused: false}}"
        for part, lr in (("blocks", 0.01), ("head", 0.002))
    ),
)
COMPILER = ("trainer.compile=default",)
CHOSEN = [
    ("frozen parts and groups", GROUPS, "ddp 2", "fsdp2 4"),
    ("frozen parts and groups", GROUPS, "fsdp2 2 c", "ddp 1"),
    ("frozen parts and groups", GROUPS, "hsdp 2x2", "fsdp2 2 c"),
    ("two updates", IN_TURN, "ddp 2", "ddp 1 c"),
    ("two updates", IN_TURN, "ddp 4 c", "ddp 2"),
    ("inductor", COMPILER, "ddp 2", "fsdp2 2"),
    ("inductor", COMPILER, "fsdp2 2", "ddp 1"),
]
QUICK = ("hsdp 2x2", "fsdp2 2 c"), ("ddp 2", "ddp 1 c")


@pytest.mark.parametrize(
    ("options", "source", "target"),
    [
        pytest.param(
            *case, id=f"{what}, {case[1]}-{case[2]}", marks=[] if tuple(case[1:]) in QUICK else pytest.mark.slow
        )
        for what, *case in CHOSEN
    ],
)
def test_so_does_one_with_more_in_it(client4, project, tmp_path, saved, options, source, target):
    if options is COMPILER and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch compiles by a C++ compiler")
    whole = saved(source, *options)
    file = whole.folder / "checkpoints" / f"step-{SAVED:06d}.pt"
    goes_on(whole, run_in(client4, project, tmp_path / "run", target, *options, resume=file))
    content = whole.checkpoint(file.name)
    if options is GROUPS:
        assert [len(group["params"]) for group in content["optimizer"]["param_groups"]] == [7, 7]
        assert "stem.weight" not in content["optimizer"]["state"]
    elif options is IN_TURN:
        assert content["optimizer"].keys() == {"blocks", "head"}
