"""Collects all that is known of one run, and what differs between runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from msgspec import to_builtins
from msgspec.structs import asdict

from ddp_hydra.config import project, redact
from ddp_hydra.config.hydra_compat import parse_override, typed_sources
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.run_dir import is_resumed
from ddp_hydra.run_state import FailureEntry, Summary
from ddp_hydra.runs import disk
from ddp_hydra.runs.describe import (
    MOST_ATTEMPTS,
    MOST_TEXT,
    RunRow,
    RunState,
    failed_attempts,
    numbers,
    read_state,
    text,
)
from ddp_hydra.runs.find import local_rows, stored_row
from ddp_hydra.runs.run_files import LocalRunFiles, RunFiles, StoredRunFiles, yaml_value
from ddp_hydra.storage.files import private_folder, user_cache
from ddp_hydra.storage.manifest import FOLDER, NAME, decode_manifest
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.run_dir import json_object

_LAST_BYTES = 2**16
MOST_TRACEBACK = 20_000
ABSENT = "(missing)"


def run_details(files: RunFiles) -> dict[str, Any]:
    state = read_state(files)
    summary, attempts = state.summary or Summary(status=""), state.attempts
    return {
        **asdict(row(files)),
        "metrics": last_metrics(files, state),
        "world_size": state.newest.world_size,
        "steps_lost": summary.steps_lost,
        "samples_per_s": summary.samples_per_s,
        "attempts": [
            {**to_builtins(one), **short, "failure": _failure(one.failure)}
            for one, short in zip(attempts, failed_attempts(attempts), strict=True)
        ],
        "failure": _failure(summary.failure),
        "checkpoints": checkpoints(files),
        "bytes": disk.by_kind(files.sizes()),
        "loaded": summary.data or {},
        "slowest": summary.slowest or {},
        "peak_memory": summary.peak_memory,
        "profile": text(summary.profile),
    }


def _failure(failure: FailureEntry | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    most = {"message": MOST_TRACEBACK, "traceback": MOST_TRACEBACK}
    found = asdict(failure).items()
    return {name: value[: most.get(name, MOST_TEXT)] if isinstance(value, str) else value for name, value in found}


def row(files: RunFiles) -> RunRow:
    if isinstance(files, StoredRunFiles):
        return stored_row(files)
    found = next(local_rows(files.place), None) or RunRow(files.place)  # removed meanwhile
    found.run = files.place
    return found


def last_metrics(files: RunFiles, state: RunState) -> dict[str, float | None]:
    """Return the last value of each metric; of a run that was killed, from the last lines of metrics.jsonl."""
    found: dict[str, Any] = {**state.newest.metrics}
    for line in () if found else files.read("metrics.jsonl", _LAST_BYTES).splitlines():
        found |= {name: value for name, value in json_object(line).items() if "/" in name}
    return numbers(found)


def checkpoints(files: RunFiles) -> dict[str, Any]:
    try:
        entries = decode_manifest(files.read(f"{FOLDER}/{NAME}")).checkpoints
    except ValueError:  # none, or one that is still being written
        return {}
    return {
        text(name): {"step": entry.step, "bytes": entry.size} for name, entry in list(entries.items())[-MOST_ATTEMPTS:]
    }


def config(files: RunFiles) -> dict[str, Any]:
    found = yaml_value(files.read(".hydra/config.yaml"))
    return dict(redact.leaves(found)) if isinstance(found, dict) else {}


def between(*runs: RunFiles) -> dict[str, Any]:
    """Return what differs between two or more runs.

    Returns:
        For `choices` (groups), `config` (dotted keys) and `metrics` a table from name to the value of each run,
        `ABSENT` where a run has none; `code`: the sha256 of their code, None if it is the same.
    """
    rows = [row(files) for files in runs]
    metrics = [last_metrics(files, read_state(files)) for files in runs]
    code = [row.project or ABSENT for row in rows]
    return {
        "runs": [row.run for row in rows],
        "status": [row.status for row in rows],
        "code": code if len(set(code)) > 1 else None,
        "choices": differing(*({"model": row.model, "data": row.data} for row in rows)),
        "config": differing(*map(config, runs)),
        "metrics": differing(*metrics),
    }


def differing(*tables: dict[str, Any]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for table in tables for key in table)
    found = {key: [table.get(key, ABSENT) for table in tables] for key in keys}
    return {key: values for key, values in found.items() if len({(type(one), repr(one)) for one in values}) > 1}


@dataclass(frozen=True)
class Reproduction:
    """Holds what runs a run again.

    Args:
        words: of the command line.
        folder: where it was typed; "" if not known.
        code_then: sha256 of the run's code; "" if not known.
        code_now: sha256 of the code here.
        kept: the folder with the code of the run, unpacked; "" if the code here is the same, or the run has none.
        hidden: keys of the overrides whose values are secret, and so were not kept.
    """

    words: list[str]
    folder: str
    code_then: str
    code_now: str
    kept: str
    hidden: list[str]


def reproduction(files: RunFiles) -> Reproduction:
    if isinstance(files, LocalRunFiles):
        files.refuse_closed(".hydra/overrides.yaml")
    typed = yaml_value(files.read(".hydra/overrides.yaml"))
    if not isinstance(typed, list) or not all(isinstance(word, str) for word in typed):
        raise ConfigError(
            f"{files.place} has no .hydra/overrides.yaml, or it is no list of overrides: only a run of a config can be "
            "run again"
        )
    odd = [word for word in typed if word.startswith("-") or not ("=" in word or word.startswith("~"))]
    if odd:
        raise ConfigError(f"{files.place}: its overrides hold {odd[0]!r}, which is not an override")
    hydra: Any = yaml_value(files.read(".hydra/hydra.yaml"))
    hydra = hydra.get("hydra", hydra) if isinstance(hydra, dict) else {}
    runtime = found if isinstance(found := hydra.get("runtime"), dict) else {}
    folder, run_dir = runtime.get("cwd"), runtime.get("output_dir")
    typed = [word for word in typed if not _resumes(word, str(folder or ""), [files.place, str(run_dir)])]
    code_then = row(files).project
    code_now = project.pack(*project.layers()).sha256
    return Reproduction(
        words=[*typed_sources(hydra), *typed],
        folder=folder if isinstance(folder, str) else "",
        code_then=code_then,
        code_now=code_now,
        kept="" if code_then == code_now else kept_code(files, code_then),
        hidden=[word.partition("=")[0] for word in typed if redact.HIDDEN in word],
    )


def _resumes(word: str, folder: str, places: Sequence[str]) -> bool:
    """Return whether an override, which was typed in `folder`, resumes a run that is or was in one of these places."""
    if word.partition("=")[0].lstrip("+") != "resume":
        return False
    with contextlib.suppress(HydraException, ConfigError):
        resumed = RunRef.own(str(parse_override(word).value()))
        if resumed.is_stored:
            return resumed.folder in places
        return any(is_resumed(Path(place), str(Path(folder) / resumed.place)) for place in places)
    return False


def kept_code(files: RunFiles, sha256: str) -> str:
    """Unpack the code that a run has kept into the user's cache folder, and return where."""
    try:
        kept = project.packed(files.read(project.ARCHIVE))
    except ValueError:
        return ""
    if kept.sha256 != sha256:
        return ""
    folder = user_cache() / "projects"
    try:
        return str(kept.unpack(private_folder(folder)))
    except OSError as error:
        raise ConfigError(
            f"the code of {files.place} can't be unpacked into {folder} ({error.strerror or error}): set "
            "XDG_CACHE_HOME=<another folder>, in front of the command"
        ) from None
