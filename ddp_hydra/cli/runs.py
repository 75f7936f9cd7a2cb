"""`ddp-hydra runs ls|show|diff|rm|du|tag|reproduce`: find runs again, compare, tag and remove them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from rich.cells import cell_len

from ddp_hydra.checked import finite_number
from ddp_hydra.cli.commands import parse_all
from ddp_hydra.cli.resumed import environment_of, saved_config, tell_environment
from ddp_hydra.config import checkpoint_config, env_values, project
from ddp_hydra.config.hydra_compat import CONFIG_DIR
from ddp_hydra.console.text import after, counted, duration, meant, printable, size_text
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.runs import details, disk, find, run_files
from ddp_hydra.runs.describe import RunRow
from ddp_hydra.runs.details import Reproduction
from ddp_hydra.runs.disk import KINDS
from ddp_hydra.storage.run_ref import RunRef

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
    """The options of `ls`."""

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
        near = meant(words[0], COMMANDS, "runs ", cutoff=0.5)
        raise ConfigError(f"runs {shown(words[0])}: there is no such command{after(near, there)}")
    COMMANDS[words[0]](list(words[1:]))


def ls(words: Sequence[str]) -> None:
    roots, rest = split(words)
    compared = {word: found for word in rest if (found := find.comparison(word)) is not None}
    options = parse_all(ListOptions, [word for word in rest if word not in compared], USAGE)
    chosen = find.Filter(
        options.status, options.tag, options.model, options.data, options.since, tuple(compared.values())
    )
    if options.limit < -1:
        raise ConfigError(f"limit={options.limit}: give how many runs to show, 0 for all")
    rows = find.rows(roots)
    rows = find.ordered(chosen.choose(rows), options.sort)
    limit = LIMIT if options.limit == -1 and not options.json else max(0, options.limit)
    most = rows[:limit] if limit else rows
    if options.json:
        for row in most:
            print(json.dumps(asdict(row)))  # noqa: T201
        return
    asked = [*(one.metric for one in compared.values()), options.sort]
    metrics = [name for name in dict.fromkeys(asked) if name not in find.SORTS]
    print(table_of(most, metrics) if rows else "no runs")  # noqa: T201
    if len(most) < len(rows):
        print(f"{len(rows) - len(most):,} more: limit=0 shows all {len(rows):,}")  # noqa: T201


def show(words: Sequence[str]) -> None:
    runs, options = runs_and_options(words, PrintOptions, 1, "show")
    found = details.run_details(run_files.open_run(runs[0]))
    print(json.dumps(found, default=str) if options.json else details_text(found))  # noqa: T201


def diff(words: Sequence[str]) -> None:
    runs, options = runs_and_options(words, PrintOptions, 2, "diff")
    found = details.between(run_files.open_run(runs[0]), run_files.open_run(runs[1]))
    print(json.dumps(found, default=str) if options.json else diff_text(found))  # noqa: T201


def rm(words: Sequence[str]) -> None:
    runs, rest = split(words)
    options: Any = parse_all(RemoveOptions, rest, USAGE)
    if not runs:
        raise ConfigError(f"rm needs a run; usage:\n{USAGE}")
    count = sum(disk.count(run) for run in runs)
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("rm asks on a terminal only: give yes=true")
        what = shown(runs[0]) if len(runs) == 1 else f"{len(runs)} folders"
        answer = input(f"remove {what} with {counted(count, 'run')}? [y/N] ")
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
    roots, rest = split(words)
    options: Any = parse_all(PrintOptions, rest, USAGE)
    found = disk.usage(roots)
    if options.json:
        for run, kinds in found.items():
            print(json.dumps({"run": run, **kinds, "total": sum(kinds.values())}))  # noqa: T201
        return
    print(usage_text(found) if found else "no runs")  # noqa: T201


def tag(words: Sequence[str]) -> None:
    changes = [word for word in words if word[:1] in ("+", "-")]
    runs, others = split([word for word in words if word not in changes])
    if others or len(runs) != 1:
        raise ConfigError(f"tag takes one run, +<tag> and -<tag>; usage:\n{USAGE}")
    files = run_files.open_run(runs[0])
    found = details.row(files).tags
    if changes:
        found = run_files.change_tags(files, found, changes)
    print(f"{shown(runs[0])}: {', '.join(map(shown, found)) or 'no tags'}")  # noqa: T201


def reproduce(words: Sequence[str]) -> None:
    runs, options = runs_and_options(words, ReproduceOptions, 1, "reproduce")
    again = details.reproduction(files := run_files.open_run(runs[0]))
    print(again_text(again), file=sys.stderr)  # noqa: T201
    with suppress(ConfigError), environment_of(runs[0], typed=None) if files.read(env_values.FILE) else nullcontext():
        tell_environment(runs[0], checkpoint_config.changed(saved_config(runs[0]) or {}))
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


_MOST = 60
"""Longer cells are cut on a terminal, except the first one, which is typed again."""
_MESSAGE = 2_000


def shown(value: object, most: int = 0) -> str:
    """Return a text as one line that does nothing in a terminal."""
    line = printable(str(value).replace("\n", " ").replace("\t", " "))
    line = "".join(one if one.isprintable() else "?" for one in line)  # also what turns the direction of writing
    return f"{line[: most - 1]}…" if most and len(line) > most else line


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    every = [tuple(headings), *map(tuple, lines)]
    widths = [max(map(cell_len, column)) for column in zip(*every, strict=True)]
    ends = [heading in right for heading in headings]

    def cell(word: str, wide: int, at_end: bool) -> str:
        space = " " * (wide - cell_len(word))
        return space + word if at_end else word + space

    return "\n".join("  ".join(map(cell, line, widths, ends)).rstrip() for line in every)


def table_of(rows: Sequence[RunRow], metrics: Sequence[str] = ()) -> str:
    columns: dict[str, list[str]] = {
        "run": [shown(row.run) for row in rows],
        "when": [when(row.started) for row in rows],
        "status": [row.status for row in rows],
        "steps": [steps(row) for row in rows],
        "objective": [f"{row.objective} {digits(row.value)}" if row.value is not None else "" for row in rows],
        **{metric: [digits(row.metrics.get(metric)) for row in rows] for metric in metrics},
        "model": [row.model for row in rows],
        "data": [row.data for row in rows],
        "tags": [", ".join(row.tags) for row in rows],
        "took": [duration(row.wall_s) for row in rows],
    }
    if any(row.stopped_early for row in rows):
        columns["stopped early"] = [row.stopped_early for row in rows]
    if any(typed := differing_words(rows)):
        columns["typed"] = [" ".join(words) for words in typed]
    most = _MOST if sys.stdout.isatty() else 0
    cells = [column if name == "run" else [shown(cell, most) for cell in column] for name, column in columns.items()]
    lines = zip(*cells, strict=True)
    return table([shown(name, _MOST) for name in columns], lines, right=("steps", "took", *metrics))


def differing_words(rows: Sequence[RunRow]) -> list[list[str]]:
    common = set.intersection(*(set(row.overrides) for row in rows)) if rows else set()
    known = ("model=", "data=", "tags=")
    return [[word for word in row.overrides if word not in common and not word.startswith(known)] for row in rows]


def details_text(found: Mapping[str, Any]) -> str:
    row = RunRow(**{name: found[name] for name in RunRow.__struct_fields__})
    took = f"for {duration(row.wall_s)}" if row.wall_s is not None else ""
    lines = [("status", row.status), ("started", " ".join(filter(None, (when(row.started), took))))]
    lines.append(("steps", steps(row) + (f", epoch {digits(row.epoch)}" if row.epoch is not None else "")))
    lines.append(("stopped", f"early: {shown(row.stopped_early, _MESSAGE)}" if row.stopped_early else ""))
    if row.value is not None:
        better = "" if row.maximize is None else f" ({'more' if row.maximize else 'less'} is better)"
        lines.append(("objective", f"{shown(row.objective)} {digits(row.value)}{better}"))
    ranks = found["world_size"]
    speed = f", {found['samples_per_s']:,.0f} samples/s" if found["samples_per_s"] else ""
    lines.append(("ranks", f"{ranks}{speed}" if ranks else ""))
    lines += [("model", shown(row.model)), ("data", shown(row.data)), ("tags", shown(", ".join(row.tags)))]
    lines += [("typed", shown(word)) for word in row.overrides]
    lines.append(("code", shown(row.project[:16])))
    lines += [("metric", f"{shown(name)} {digits(value)}") for name, value in found["metrics"].items()]
    lines += [("attempt", _attempt(attempt)) for attempt in found["attempts"]]
    if failure := found["failure"]:
        lines += [("failure", _failure(failure)), ("at", shown(failure["place"]))]
    elif row.message:
        lines.append(("failure", shown(row.message, _MESSAGE)))
    lines += [
        ("checkpoint", f"{shown(name)}, step {digits(entry['step'])}, {size_text(entry['bytes'] or 0)}")
        for name, entry in found["checkpoints"].items()
    ]
    kinds = [f"{kind} {size_text(count)}" for kind, count in found["bytes"].items() if count]
    lines.append(("size", f"{size_text(sum(found['bytes'].values()))}: {', '.join(kinds)}" if kinds else "0 B"))
    return "\n".join([shown(row.run), *_without_repeats((name, value) for name, value in lines if value)])


def _without_repeats(lines: Iterable[tuple[str, str]]) -> list[str]:
    found, before = [], ""
    for name, value in lines:
        found.append(f"  {'' if name == before else name:<11} {value}")
        before = name
    return found


def _attempt(attempt: Mapping[str, Any]) -> str:
    parts = [
        counted(attempt["world_size"], "rank") if attempt["world_size"] else "",
        counted(attempt["steps_done"], "step"),
        duration(attempt["wall_s"]),
    ]
    how = f": {_failure(attempt['failure'])}" if attempt["failure"] else ""
    return f"{attempt['attempt']}: {', '.join(filter(None, parts))}{how}"


def _failure(failure: Mapping[str, Any]) -> str:
    where = [f"rank {failure['rank']}"] if failure["rank"] is not None else []
    where += [f"on {failure['host']}"] if failure["host"] else []
    where += [f"at step {failure['step']}"] if failure["step"] is not None else []
    return shown(f"{' '.join(where)}{': ' if where else ''}{failure['message'] or failure['kind']}", _MESSAGE)


def diff_text(found: Mapping[str, Any]) -> str:
    most = _MOST if sys.stdout.isatty() else 0

    def line(key: str, values: Sequence[object]) -> tuple[str, ...]:
        texts = details.cells(values, lambda one: shown(_value(one), most), lambda one: shown(_value(one)))
        return (shown(key), *map(shown, texts))

    lines = [("", *map(shown, found["runs"]))]
    if found["status"][0] != found["status"][1]:
        lines.append(("status", *found["status"]))
    if found["code"]:
        lines.append(("code", *(shown(code[:16]) for code in found["code"])))
    lines += [line(key, pair) for part in ("choices", "config") for key, pair in found[part].items()]
    if len(lines) == 1 and not found["problems"]:
        lines.append(("(config and code are the same)", "", ""))
    lines += [line(key, pair) for key, pair in found["metrics"].items()]
    return "\n".join([table(lines[0], lines[1:]), *map(shown, found["problems"])])


def _value(value: object) -> str:
    if isinstance(value, float):
        return digits(value) or str(value)  # infinity and NaN have no digits
    return value if isinstance(value, str) else details.json_text(value)


def usage_text(found: Mapping[str, Mapping[str, int]]) -> str:
    largest = sorted(found, key=lambda run: (-sum(found[run].values()), run))
    lines = [(shown(run), *_sizes(found[run])) for run in largest]
    total = {kind: sum(kinds[kind] for kinds in found.values()) for kind in KINDS}
    lines.append((f"total of {counted(len(found), 'run')}", *_sizes(total)))
    headings = ("run", *KINDS, "total")
    return table(headings, lines, right=headings[1:])


def _sizes(kinds: Mapping[str, int]) -> list[str]:
    return [size_text(kinds[kind]) for kind in KINDS] + [size_text(sum(kinds.values()))]


def again_text(again: Reproduction) -> str:
    lines = []
    if not again.code_then:
        lines.append("the run has not noted the hash of its code, so it is not known whether this one is the same")
    elif again.code_then != again.code_now:
        taken = f"the run's is taken: {shown(again.kept)}"
        missing = "the run has not kept its own, so check out what it was made with"
        hashes = f"{shown(again.code_then[:16])} then, {again.code_now[:16]} in this folder"
        lines.append(f"the code is not the same: {hashes}; {taken if again.kept else missing}")
    else:
        lines.append(f"the code is the same: {again.code_now[:16]}")
    if again.problem:
        lost = "where it was typed, and whether with --config-name, --config-dir or hydra.searchpath, is not known"
        lines.append(f"{shown(again.problem)}: {lost}")
    if again.folder:
        lines.append(f"it was typed in {shown(again.folder)}")
    for key, _, folder in (word.partition("=") for word in again.words):
        if key == CONFIG_DIR and not Path(folder).is_dir():
            lines.append(f"{CONFIG_DIR} {shown(folder)} is not there: type {CONFIG_DIR} <where it is now>")
    if again.hidden:
        lines.append(f"secrets were not kept: fill in {', '.join(map(shown, again.hidden))}")
    return "\n".join(lines)


def steps(row: RunRow) -> str:
    """Return for example "40/400"."""
    if row.step is None:
        return ""
    return f"{row.step:,}/{row.total_steps:,}" if row.total_steps and row.status != "done" else f"{row.step:,}"


def when(started: float | None) -> str:
    if started is None:
        return ""
    try:
        return datetime.fromtimestamp(started).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return ""


def digits(value: object) -> str:
    """Return a number with four digits; a whole one with all."""
    found = finite_number(value)
    if found is None:
        return ""
    return f"{found:.0f}" if found == int(found) and abs(found) < 1e15 else f"{found:.4g}"
