"""Collects all that is known of one run, and what differs between runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from msgspec import to_builtins
from msgspec.structs import asdict

from ddp_hydra.config import env_values, project, redact, references
from ddp_hydra.config.hydra_compat import ENV_SET, parse_override, typed_sources
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.run_dir import is_resumed
from ddp_hydra.run_state import FailureEntry, Summary
from ddp_hydra.runs import disk
from ddp_hydra.runs.describe import (
    MOST_ATTEMPTS,
    MOST_TEXT,
    RunRow,
    RunState,
    choices,
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
CONFIG, HYDRA = ".hydra/config.yaml", ".hydra/hydra.yaml"
"""Files that a run of a config has."""


class Mark(str):
    """A text in place of a value: no value of a config has this type."""

    __slots__ = ()


ABSENT, UNKNOWN = Mark("(missing)"), Mark("(unknown)")
"""For a key that a run does not have, and for one of a file that can't be read."""


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


def config(files: RunFiles) -> dict[str, Any] | None:
    """Return the values of a run's config by dotted key; None if its file is missing or can't be read."""
    found = yaml_value(files.read(CONFIG))
    return dict(references.with_full_names(found)) if isinstance(found, dict) else None


def between(*runs: RunFiles) -> dict[str, Any]:
    """Return what differs between two or more runs.

    Returns:
        For `choices` (groups), `config` (dotted keys) and `metrics` a table from name to the value of each run,
        `ABSENT` where a run has none, `UNKNOWN` where its config can't be read; `problems`: a sentence for each such
        config; `code`: the sha256 of their code, None if it is the same.
    """
    rows = [row(files) for files in runs]
    metrics = [last_metrics(files, read_state(files)) for files in runs]
    code = [row.project or ABSENT for row in rows]
    configs = [config(files) for files in runs]
    groups = [_groups(files) for files in runs]
    # A value of the environment is compared where each run has kept it; else what was written is.
    given = [env_values.decoded(files.read(env_values.FILE)) for files in runs]
    for key in set(given[0]).intersection(*given[1:]):
        for found, values in zip(configs, given, strict=True):
            if found is not None and "${oc.env:" in str(found.get(key)):
                found[key] = values[key]
    return {
        "runs": [row.run for row in rows],
        "status": [row.status for row in rows],
        "code": code if len(set(code)) > 1 else None,
        "choices": differing(*groups),
        "config": differing(*configs) | differing(*map(_variables, runs)),
        "metrics": differing(*metrics),
        "problems": [
            f"{files.place}/{CONFIG} is missing or can't be read: the config of this run is not compared"
            for files, found in zip(runs, configs, strict=True)
            if found is None
        ],
    }


def _groups(files: RunFiles) -> dict[str, Any]:
    chosen = choices(files.read(HYDRA))
    return {key: chosen[key] or None for key in ("model", "data") if key in chosen}


def _variables(files: RunFiles) -> dict[str, Any] | None:
    """Return the variables of the environment that Hydra has set for a run, by their keys; None if they are unknown."""
    found = yaml_value(files.read(HYDRA))
    if not isinstance(found, dict):
        return None
    return redact.without({key: one for key, one in redact.leaves(found) if key.startswith(f"{ENV_SET}.")})


def differing(*tables: dict[str, Any] | None) -> dict[str, list[Any]]:
    """Return the values of each key that differ. A table that can't be read is None, and makes no difference."""
    keys = dict.fromkeys(key for table in tables for key in table or ())
    found = {key: [UNKNOWN if table is None else table.get(key, ABSENT) for table in tables] for key in keys}
    return {key: values for key, values in found.items() if _count(one for one in values if one is not UNKNOWN) > 1}


def _count(values: Iterable[object]) -> int:
    """Return how many different values there are: 1, 1.0, True and "1" are four."""
    return len({(type(one), repr(one)) for one in values})


def cells(values: Sequence[object], *ways: Callable[[object], str]) -> list[str]:
    """Return values as texts, by the first way in which different values read differently.

    Args:
        ways: write a value, the shortest first. JSON, and then Python's `repr`, come after them.
    """
    found: list[str] = []
    for way in (*ways, json_text, repr):
        found = [str(one) if isinstance(one, Mark) else way(one) for one in values]
        if len({one.strip() for one in found}) == _count(values):  # blanks at the end can't be seen
            break
    return found


def json_text(value: object) -> str:
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


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
        problem: why it is not known where configs came from; "" if it is.
    """

    words: list[str]
    folder: str
    code_then: str
    code_now: str
    kept: str
    hidden: list[str]
    problem: str = ""


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
    hydra: Any = yaml_value(files.read(HYDRA))
    problem = "" if isinstance(hydra, dict) else f"{files.place}/{HYDRA} is missing or can't be read"
    hydra = hydra.get("hydra", hydra) if isinstance(hydra, dict) else {}
    runtime = found if isinstance(found := hydra.get("runtime"), dict) else {}
    folder, run_dir = runtime.get("cwd"), runtime.get("output_dir")
    typed = [word for word in typed if not _resumes(word, str(folder or ""), [files.place, str(run_dir)])]
    code_then = row(files).project
    code_now = project.pack(*project.layers()).sha256
    # A sweep that its config makes, and not -m, must not begin again with one of its jobs.
    is_of_sweep = hydra.get("mode") == "MULTIRUN" or any(word.startswith("resume=") for word in typed)
    words = [*typed_sources(hydra), *typed, *["hydra.mode=RUN"] * is_of_sweep]
    return Reproduction(
        words=words,
        folder=folder if isinstance(folder, str) else "",
        code_then=code_then,
        code_now=code_now,
        kept="" if code_then == code_now else kept_code(files, code_then),
        hidden=[word.partition("=")[0] for word in words if redact.HIDDEN in word],
        problem=problem,
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
