"""Compare runs: their configs, their code, and their last metrics."""

from __future__ import annotations

from typing import Any

from ddp_hydra.runs import details
from ddp_hydra.runs.describe import read_both
from ddp_hydra.runs.run_files import RunFiles

ABSENT = "(missing)"


def between(*runs: RunFiles) -> dict[str, Any]:
    """Return what differs between two or more runs.

    Returns:
        For `choices` (groups), `config` (dotted keys) and `metrics` a table from name to the value of each run,
        `ABSENT` where a run has none; `code`: the sha256 of their code, None if it is the same.

    Raises:
        ConfigError: a store does not answer.
    """
    rows = [details.row(files) for files in runs]
    metrics = [details.last_metrics(files, *read_both(files)) for files in runs]
    code = [row.project or ABSENT for row in rows]
    return {
        "runs": [row.run for row in rows],
        "status": [row.status for row in rows],
        "code": code if len(set(code)) > 1 else None,
        "choices": differing(*({"model": row.model, "data": row.data} for row in rows)),
        "config": differing(*map(details.config, runs)),
        "metrics": differing(*metrics),
    }


def differing(*tables: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each key that has not the same in all tables."""
    keys = {key: None for table in tables for key in table}
    found = {key: [table.get(key, ABSENT) for table in tables] for key in keys}
    return {key: values for key, values in found.items() if not all(_same(values[0], one) for one in values)}


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first == second
