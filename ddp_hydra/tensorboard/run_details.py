"""Describes one run for the page, reads the tail of a log, and compares runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ddp_hydra.runs import details
from ddp_hydra.runs.describe import number, text
from ddp_hydra.runs.run_files import RunFiles
from ddp_hydra.tensorboard.run_list import shown
from ddp_hydra.writers.run_dir import json_object

LOG_BYTES = 2**16
"""So much of the end of a log is shown."""
CURVE_BYTES = 2**20
"""So much of the end of metrics.jsonl is read for the time line."""
MOST_POINTS = 400
MOST_KEYS = 1_000
MOST_LOGS = 1_000
_LOG = re.compile(r"logs/rank-(\d{1,6})\.log")


def of_run(files: RunFiles) -> dict[str, Any]:
    found = details.run_details(files)
    own = {"place": files.place, "code": found["project"], "logs": logs(files)}
    return {**shown(found), **own, **progress(files, found["objective"])}


def progress(files: RunFiles, objective: str) -> dict[str, Any]:
    """Return when each attempt has logged, and the curve of the objective, from the end of metrics.jsonl.

    Returns:
        `logged`: for each attempt the times of its first and last line in seconds since 1970, and their steps;
        `curve`: time, step and value for each line with the objective, thinned out.
    """
    logged: dict[int, dict[str, Any]] = {}
    curve = []
    for line in files.read("metrics.jsonl", CURVE_BYTES).splitlines():
        entry = json_object(line)
        at, step, value = (number(entry.get(name)) for name in ("time", "step", objective))
        attempt = number(entry.get("attempt"))
        if at is None or step is None or attempt is None:
            continue
        known = logged.setdefault(int(attempt), {"attempt": int(attempt), "first": at, "from_step": step})
        known |= {"last": at, "to_step": step}
        if value is not None:
            curve.append([at, step, value])
    every = max(1, -(-len(curve) // MOST_POINTS))
    return {"logged": list(islice(logged.values(), MOST_KEYS)), "curve": curve[::-every][::-1]}


def logs(files: RunFiles) -> list[dict[str, int]]:
    found = [
        {"rank": int(name[1]), "bytes": size}
        for path, size in files.sizes().items()
        if (name := _LOG.fullmatch(path)) is not None
    ]
    return sorted(found, key=lambda one: one["rank"])[:MOST_LOGS]


def log(files: RunFiles, rank: int) -> dict[str, Any]:
    content = files.read(f"logs/rank-{rank}.log", LOG_BYTES)
    return {"rank": rank, "text": content.decode(errors="replace"), "is_cut": len(content) >= LOG_BYTES}


def comparison(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    found = details.between(*runs)
    parts = {part: _texts_of(found[part]) for part in ("choices", "config", "metrics")}
    return {"names": list(names), "status": found["status"], "code": found["code"], **parts}


def _texts_of(table: Mapping[Any, Sequence[Any]]) -> dict[str, list[str]]:
    return {text(str(key)): [_value_text(one) for one in values] for key, values in islice(table.items(), MOST_KEYS)}


def _value_text(value: object) -> str:
    try:
        return text(value if isinstance(value, str) else json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):
        return text(str(type(value)))
