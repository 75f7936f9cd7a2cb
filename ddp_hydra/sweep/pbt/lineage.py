"""Writes who copied whom: lineage.csv, lineage.md, and a picture of it."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hydra.storage.files import write_atomic
from ddp_hydra.sweep import pictures
from ddp_hydra.sweep.pbt.population import ranked
from ddp_hydra.sweep.pictures import BEST, JOB
from ddp_hydra.sweep.rows import Objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAINT = "#b8bec6"


@dataclass(frozen=True)
class Entry:
    """Describes a member at the end of its generation.

    Args:
        generation: its number.
        member: its place in the generation.
        parent: the place of the member whose checkpoint it began with; None in the first generation.
        values: of the keys that are searched.
        score: its objective; None if it has failed.
        folder: its run directory.
    """

    generation: int
    member: int
    parent: int | None
    values: dict[str, str]
    score: float | None
    folder: str


Generations = Sequence[Sequence[Entry]]


def best_of(generations: Generations, objective: Objective) -> Entry | None:
    """Return the best member of the last generation; None if all have failed."""
    last = generations[-1]
    best = last[ranked([entry.score for entry in last], bool(objective.maximize))[0]]
    return best if best.score is not None else None


def ancestors(generations: Generations, entry: Entry) -> list[Entry]:
    """Return the members that one comes from, itself included, the first generation first."""
    found = [entry]
    while found[0].parent is not None:
        found.insert(0, generations[found[0].generation - 1][found[0].parent])
    return found


def describe_best(generations: Generations, objective: Objective, folder: str) -> str:
    """Return the best member, the values it had, and its checkpoint, in some lines."""
    best = best_of(generations, objective)
    if best is None:
        return f"all members of generation {len(generations) - 1} have failed: see {folder}/sweep.md"
    steps = [
        f"  generation {one.generation}, member {one.member}: {_words(one)}" for one in ancestors(generations, best)
    ]
    place = Path(os.path.relpath(best.folder), "checkpoints", "last.pt")
    first = f"best: member {best.member} with {objective.metric} {best.score:.5g}  ->  {place}"
    return "\n".join([first, *steps])


def write(folder: Path, generations: Generations, objective: Objective) -> None:
    """Write lineage.csv and lineage.md.

    Args:
        folder: of the sweep.
        generations: those that have ended.
        objective: the metric that members are compared by.
    """
    entries = [entry for generation in generations for entry in generation]
    keys = list(entries[0].values)
    head = ["generation", "member", "parent", *keys, objective.metric, "folder"]
    lines = [
        [one.generation, one.member, one.parent, *one.values.values(), one.score, os.path.relpath(one.folder, folder)]
        for one in entries
    ]
    target = io.StringIO()
    table = csv.writer(target, lineterminator="\n")
    table.writerows([head, *lines])
    write_atomic(folder / "lineage.csv", target.getvalue().encode(), durable=False)
    write_atomic(folder / "lineage.md", markdown_text(generations, objective).encode(), durable=False)


def markdown_text(generations: Generations, objective: Objective) -> str:
    """Return a page with the lineage of the best member so far, and of each generation who copied whom."""
    best = best_of(generations, objective)
    lines = [f"# {len(generations)} generations of {len(generations[0])} members", ""]
    if best is not None:
        lines += [f"The best is member {best.member} with {objective.metric} {best.score:.5g}. It comes from:", ""]
        lines += [f"- {_described(one)}" for one in ancestors(generations, best)]
        lines += [""]
    for number, generation in enumerate(generations):
        copies = [entry for entry in generation if entry.parent not in (None, entry.member)]
        if copies:
            lines += [f"## Generation {number}", ""]
            lines += [f"- member {one.member} copied member {one.parent}: {_words(one)}" for one in copies]
            lines += [""]
    return "\n".join(lines)


def draw(folder: Path, generations: Generations, objective: Objective) -> bool:
    """Draw lineage.png and lineage.svg: the objective of each member over the generations, and who copied whom.

    Args:
        folder: of the sweep.
        generations: all of them.
        objective: the metric that members are compared by.

    Returns:
        Whether they were drawn; without matplotlib, or without any values, they are not.
    """
    if not any(entry.score is not None for generation in generations for entry in generation):
        return False
    return pictures.draw(partial(_figure, generations, objective), folder, "lineage")


def _figure(generations: Generations, objective: Objective) -> Figure:
    from matplotlib.figure import Figure

    best = best_of(generations, objective)
    line = ancestors(generations, best) if best else []
    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    labels: set[str] = set()
    for generation in generations[1:]:
        for entry in generation:
            parent = generations[entry.generation - 1][entry.parent or 0]
            if entry.score is None or parent.score is None:
                continue
            is_copy, is_best = entry.parent != entry.member, entry in line
            label = "copied, with other values" if is_copy else "went on"
            axes.plot(
                [parent.generation, entry.generation], [parent.score, entry.score], zorder=2 if is_best else 1,
                color=BEST if is_best else JOB if is_copy else _FAINT, linewidth=2.4 if is_best else 1.2,
                linestyle="--" if is_copy else "-", label="" if label in labels or is_best else label,
            )  # fmt: skip
            labels |= set() if is_best else {label}
    points = [(one.generation, one.score) for every in generations for one in every if one.score is not None]
    axes.scatter([at for at, _ in points], [score for _, score in points], s=26, color=JOB, zorder=3)
    if best is not None and best.score is not None:
        axes.scatter(
            best.generation, best.score, marker="*", s=200, color=BEST, edgecolor="#5a3f00", linewidth=0.8,
            zorder=4, label=f"the best: member {best.member}",
        )  # fmt: skip
    axes.set_xticks(range(len(generations)))
    axes.set_xlabel("generation")
    axes.set_ylabel(objective.metric)
    axes.tick_params(which="both", length=0)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _described(entry: Entry) -> str:
    score = "failed" if entry.score is None else f"{entry.score:.5g}"
    return f"generation {entry.generation}, member {entry.member}: {score} with {_words(entry)}"


def _words(entry: Entry) -> str:
    return ", ".join(f"{key}={value}" for key, value in entry.values.items())
