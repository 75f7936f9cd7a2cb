"""`ddp-hydra runs ls|show|diff|rm|du|tag|reproduce`: find runs again, compare, tag and remove them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from ddp_hydra.cli import runs_text
from ddp_hydra.cli.commands import parse_all
from ddp_hydra.cli.runs_text import shown
from ddp_hydra.console import text
from ddp_hydra.console.text import size_text
from ddp_hydra.errors import ConfigError, Interrupted

USAGE = """ddp-hydra runs ls [<folder or URL> ...] [status=done,failed] [tag=good] [model=resnet18] [data=digits]
    [since=2026-11-01|7d] ['val/accuracy>0.9' ...] [sort=when|duration|steps|status|folder|objective|<metric>]
    [limit=100] [json=true]
ddp-hydra runs show <run> [json=true]
ddp-hydra runs diff <run> <run> [json=true]
ddp-hydra runs rm <run or sweep> ... [yes=true]
ddp-hydra runs du [<folder or URL> ...] [json=true]
ddp-hydra runs tag <run> +<tag> ... -<tag> ...
ddp-hydra runs reproduce <run> [run=true]
A run is a run directory, outputs/<date>/<time>, or the URL of its results."""
LIMIT = 100


@dataclass
class ListOptions:
    """The options of `ls`.

    Args:
        status: one or more, with commas.
        tag: of the run; * stands for any characters, as in `model` and `data`.
        model: option of the group `model`.
        data: option of the group `data`.
        since: a date, or a time up to now, 7d.
        sort: the order; see the usage.
        limit: how many to show; 0 for all.
        json: print a JSON object for each run.
    """

    status: str = ""
    tag: str = ""
    model: str = ""
    data: str = ""
    since: str = ""
    sort: str = "when"
    limit: int = -1
    json: bool = False


# The others have one option each: print JSON; do not ask; run it, instead of printing what to type.
PrintOptions, RemoveOptions, ReproduceOptions = (
    make_dataclass("Options", [(name, bool, False)]) for name in ("json", "yes", "run")
)


def main(words: Sequence[str]) -> None:
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)  # noqa: T201
        return
    if words[0] not in COMMANDS:
        there = f"they are {', '.join(COMMANDS)}; ddp-hydra runs --help explains them"
        near = text.meant(words[0], COMMANDS, "runs ", cutoff=0.5)
        raise ConfigError(f"runs {shown(words[0])}: there is no such command{text.after(near, there)}")
    COMMANDS[words[0]](list(words[1:]))


def ls(words: Sequence[str]) -> None:
    from ddp_hydra.runs import find, select

    roots, rest = split(words)
    compared = {word: found for word in rest if (found := select.comparison(word)) is not None}
    options = parse_all(ListOptions, [word for word in rest if word not in compared], USAGE)
    chosen = select.Filter(
        options.status, options.tag, options.model, options.data, options.since, tuple(compared.values())
    )
    if options.limit < -1:
        raise ConfigError(f"limit={options.limit}: give how many runs to show, 0 for all")
    rows = find.rows(roots)
    rows = select.ordered(chosen.choose(rows), options.sort)
    limit = LIMIT if options.limit == -1 and not options.json else max(0, options.limit)
    most = rows[:limit] if limit else rows
    if options.json:
        for row in most:
            print(json.dumps(asdict(row)))  # noqa: T201
        return
    asked = [*(one.metric for one in compared.values()), options.sort]
    metrics = [name for name in dict.fromkeys(asked) if name not in select.SORTS]
    print(runs_text.table_of(most, metrics) if rows else "no runs")  # noqa: T201
    if len(most) < len(rows):
        print(f"{len(rows) - len(most):,} more: limit=0 shows all {len(rows):,}")  # noqa: T201


def show(words: Sequence[str]) -> None:
    from ddp_hydra.runs import details, run_files

    runs, options = runs_and_options(words, PrintOptions, 1, "show")
    found = details.run_details(run_files.open_run(runs[0]))
    print(json.dumps(found, default=str) if options.json else runs_text.details_text(found))  # noqa: T201


def diff(words: Sequence[str]) -> None:
    from ddp_hydra.runs import details, run_files

    runs, options = runs_and_options(words, PrintOptions, 2, "diff")
    found = details.between(run_files.open_run(runs[0]), run_files.open_run(runs[1]))
    print(json.dumps(found, default=str) if options.json else runs_text.diff_text(found))  # noqa: T201


def rm(words: Sequence[str]) -> None:
    from ddp_hydra.runs import disk
    from ddp_hydra.storage.run_ref import RunRef

    runs, rest = split(words)
    options: Any = parse_all(RemoveOptions, rest, USAGE)
    if not runs:
        raise ConfigError(f"rm needs a run; usage:\n{USAGE}")
    count = sum(disk.count(run) for run in runs)
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("rm asks on a terminal only: give yes=true")
        what = shown(runs[0]) if len(runs) == 1 else f"{len(runs)} folders"
        answer = input(f"remove {what} with {count} run{'s' if count != 1 else ''}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise Interrupted("nothing was removed")
    for run in runs:
        results = own = RunRef.own(run)
        with suppress(ConfigError):  # a pointer that is broken names no results, and goes with its run
            results = RunRef.named(run)
        removal = disk.remove(run)
        print(f"removed {shown(run)}, {size_text(removal.freed)}")  # noqa: T201
        if removal.left:
            more = f" and {len(removal.left) - 8} more" if len(removal.left) > 8 else ""
            left = shown(", ".join(removal.left[:8]))
            print(f"left there, as no run has written it: {left}{more}")  # noqa: T201
        if results != own:
            print(f"its results stay in {shown(results.place)}")  # noqa: T201


def du(words: Sequence[str]) -> None:
    from ddp_hydra.runs import disk, find

    roots, rest = split(words)
    options: Any = parse_all(PrintOptions, rest, USAGE)
    found = disk.usage(roots or [name for name in find.DEFAULT_ROOTS if Path(name).is_dir()])
    if options.json:
        for run, kinds in found.items():
            print(json.dumps({"run": run, **kinds, "total": sum(kinds.values())}))  # noqa: T201
        return
    print(runs_text.usage_text(found) if found else "no runs")  # noqa: T201


def tag(words: Sequence[str]) -> None:
    from ddp_hydra.runs import run_files
    from ddp_hydra.runs.details import row

    changes = [word for word in words if word[:1] in ("+", "-")]
    runs, others = split([word for word in words if word not in changes])
    if others or len(runs) != 1:
        raise ConfigError(f"tag takes one run, +<tag> and -<tag>; usage:\n{USAGE}")
    files = run_files.open_run(runs[0])
    found = row(files).tags
    if changes:
        found = run_files.change_tags(files, found, changes)
    print(f"{shown(runs[0])}: {', '.join(map(shown, found)) or 'no tags'}")  # noqa: T201


def reproduce(words: Sequence[str]) -> None:
    from ddp_hydra.config import project
    from ddp_hydra.runs import details, run_files

    runs, options = runs_and_options(words, ReproduceOptions, 1, "reproduce")
    again = details.reproduction(run_files.open_run(runs[0]))
    print(runs_text.again_text(again), file=sys.stderr)  # noqa: T201
    if not options.run:
        variable = [f"{project.VARIABLE}={shlex.quote(again.kept)}"] if again.kept else []
        print(shown(" ".join([*variable, shlex.join(["ddp-hydra", *again.words])])))  # noqa: T201
        return
    if again.hidden:
        raise ConfigError(f"{shown(again.hidden[0])} is a secret, which the run does not keep: type the command")
    sys.stdout.flush()
    variables = {**os.environ, **({project.VARIABLE: again.kept} if again.kept else {})}
    os.execve(sys.executable, [sys.executable, "-m", "ddp_hydra", *again.words], variables)  # noqa: S606


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "ls": ls, "show": show, "diff": diff, "rm": rm, "du": du, "tag": tag, "reproduce": reproduce,
}  # fmt: skip


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the places, which are folders and URLs, and the other words. The names of both may hold "="."""
    places = [
        word for word in words if not set("=<>") & set(word) or "://" in word.partition("=")[0] or os.path.lexists(word)
    ]
    return places, [word for word in words if word not in places]


def runs_and_options(words: Sequence[str], kind: type[Any], count: int, command: str) -> tuple[list[str], Any]:
    runs, rest = split(words)
    options = parse_all(kind, rest, USAGE)
    if len(runs) != count:
        what = "one run" if count == 1 else f"{count} runs"
        raise ConfigError(f"{command} takes {what}, not {len(runs)}; usage:\n{USAGE}")
    return runs, options
