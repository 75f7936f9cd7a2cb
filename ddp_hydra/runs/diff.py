"""Compare two runs: their configs, their code, and their last metrics."""

from __future__ import annotations

from typing import Any

from ddp_hydra.runs import details
from ddp_hydra.runs.describe import read_both
from ddp_hydra.runs.run_files import RunFiles

ABSENT = "(missing)"


def between(first: RunFiles, second: RunFiles) -> dict[str, Any]:
    """Return what differs between two runs.

    Returns:
        For `choices` (groups), `config` (dotted keys) and `metrics` a table from name to the two values, `ABSENT` where
        a run has none; `code`: the two sha256 of their code, None if they are the same.

    Raises:
        ConfigError: a store does not answer.
    """
    rows = [details.row(files) for files in (first, second)]
    metrics = [details.last_metrics(files, *read_both(files)) for files in (first, second)]
    code = [row.project or ABSENT for row in rows]
    return {
        "runs": [row.run for row in rows],
        "status": [row.status for row in rows],
        "code": code if code[0] != code[1] else None,
        "choices": differing(*({"model": row.model, "data": row.data} for row in rows)),
        "config": differing(details.config(first), details.config(second)),
        "metrics": differing(*metrics),
    }


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the two values of each key that has not the same in both."""
    return {
        key: [first.get(key, ABSENT), second.get(key, ABSENT)]
        for key in {**first, **second}
        if not _same(first.get(key, ABSENT), second.get(key, ABSENT))
    }


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first == second
