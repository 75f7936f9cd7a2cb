"""Writes docs/gpu.md from what was measured."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path

import ddp_hydra
from benchmarks import commands, report
from benchmarks.gpu.card import Card
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.report import Absent, Line

PAGE = commands.ROOT / "docs" / "gpu.md"
ON_A_CARD = "Measured on"
"""Begins the line that names the card."""


def may_write(path: Path, on_gpu: bool) -> bool:
    """Return whether a page is to be written: a rehearsal on the CPU does not replace what a card has measured."""
    return on_gpu or not path.is_file() or f"\n{ON_A_CARD} " not in path.read_text(encoding="utf-8")


def render(card: Card, measured: Sequence[tuple[Part, list[Line]]], date: datetime.date, command: str) -> str:
    """Return the page.

    Args:
        card: what it was measured on.
        measured: parts with their lines.
        date: of the day.
        command: that has made it.
    """
    shown = [part for part, _ in measured]
    left_out = [part.name for part in PARTS if part not in shown]
    lines = [
        "# GPUs",
        "",
        "`make gpu-report` runs all that differs between CUDA and the CPU, on any machine with a GPU, and writes",
        "this page. `make gpu-report DEVICE=cpu` rehearses it with small sizes where there is none. Real jobs run by",
        "the command that users type, in run directories that are thrown away.",
        "",
        *place(card),
        f"ddp_hydra {ddp_hydra.__version__}, {report.machine()}, {date.isoformat()}, by `{command}`.",
        "",
    ]
    if left_out:
        lines += [f"These parts were not run: {', '.join(left_out)}.", ""]
    for part, found in measured:
        lines += [f"## {part.name}", "", part.about, "", *table(found), ""]
    return "\n".join(lines)


def place(card: Card) -> list[str]:
    """Return the lines that say what it was measured on."""
    if not card.gpus:
        return [
            "**No GPU has been measured yet.** The figures below are of the rehearsal on a CPU: they show that the",
            "report runs, and say nothing of GPUs. Speeds have no goals here, and what needs a GPU is left out.",
            "",
            f"torch {card.torch_version}.",
        ]
    driver = f", driver {card.driver}" if card.driver else ""
    gpus = f"{card.gpus} x {card.name} ({card.memory_gib:.0f} GiB){driver}"
    return [f"{ON_A_CARD} {gpus}, torch {card.torch_version}, CUDA {card.cuda_version}."]


def table(lines: Iterable[Line]) -> list[str]:
    """Return the lines of a part as a table, and below it what has no figure."""
    rows = ["| figure | value | unit | goal | |", "| --- | --- | --- | --- | --- |"]
    notes = []
    for line in lines:
        if isinstance(line, Absent):
            notes.append(f"- **{line.verdict}**: {line.name}: {line.why}")
            continue
        goal, verdict = "", ""
        if line.goal is not None:
            goal, verdict = str(line.goal), "ok" if line.met else "**missed**"
        value = report.digits(line.median)
        if len(line.runs) > 1:
            value += f" ({report.digits(line.worst)} to {report.digits(line.best)})"
        rows.append(f"| {line.name} | {value} | {line.unit} | {goal} | {verdict} |")
    if len(rows) == 2:
        return notes
    return [*rows, "", *notes] if notes else rows
