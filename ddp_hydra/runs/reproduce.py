"""Finds the words that run a run again, and whether the code is still the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_hydra.config import project, redact
from ddp_hydra.data.user_cache import private_folder, user_cache
from ddp_hydra.errors import ConfigError
from ddp_hydra.runs import details
from ddp_hydra.runs.run_files import RunFiles, yaml_value


@dataclass(frozen=True)
class Again:
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


def of(files: RunFiles) -> Again:
    """Return what runs a run again.

    Raises:
        ConfigError: it is not a run of a config, or the code here can't be packed.
    """
    typed = yaml_value(files.read(".hydra/overrides.yaml"))
    if not isinstance(typed, list) or not all(isinstance(word, str) for word in typed):
        raise ConfigError(f"{files.place} has no .hydra/overrides.yaml: only a run of a config can be run again")
    odd = [word for word in typed if word.startswith("-") or not ("=" in word or word.startswith("~"))]
    if odd:
        raise ConfigError(f"{files.place}: its overrides hold {odd[0]!r}, which is not an override")
    hydra: Any = yaml_value(files.read(".hydra/hydra.yaml"))
    hydra = hydra.get("hydra", hydra) if isinstance(hydra, dict) else {}
    job, runtime = (hydra.get(name) if isinstance(hydra.get(name), dict) else {} for name in ("job", "runtime"))
    name, folder = job.get("config_name"), runtime.get("cwd")
    own = [f"--config-name={name}"] if isinstance(name, str) and name != "config" else []
    code_then = details.row(files).project
    code_now = project.pack(*project.layers()).sha256
    return Again(
        words=[*own, *typed],
        folder=folder if isinstance(folder, str) else "",
        code_then=code_then,
        code_now=code_now,
        kept="" if code_then == code_now else kept_code(files, code_then),
        hidden=[word.partition("=")[0] for word in typed if redact.HIDDEN in word],
    )


def kept_code(files: RunFiles, sha256: str) -> str:
    """Unpack the code that a run has kept into the user's cache folder, and return where.

    Args:
        files: of the run.
        sha256: what summary.json says of it.

    Returns:
        "" if there is none, or it is not the code that the run was made with.

    Raises:
        ConfigError: it can't be unpacked.
    """
    try:
        kept = project.packed(files.read(project.ARCHIVE))
    except ValueError:
        return ""
    if kept.sha256 != sha256:
        return ""
    try:
        return str(kept.unpack(private_folder(user_cache() / "projects")))
    except OSError as error:
        raise ConfigError(f"the code of {files.place} can't be unpacked: {error}") from None
