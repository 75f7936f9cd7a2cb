"""What is typed, made into what Hydra takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddp_hydra.config.redact import HIDDEN
from ddp_hydra.errors import ConfigError


def read(arguments: list[str]) -> list[str]:
    """Return what Hydra shall see.

    Args:
        arguments: as they were typed.
    """
    return with_faults(with_resumed_sweep(with_resumed_overrides(with_search(arguments))))


def with_search(arguments: list[str]) -> list[str]:
    """Let `hparams_search=<name>` be a sweep without `-m`: Hydra 1.4 lets no config of a group say that.

    Args:
        arguments: of the command line.
    """
    said = {"-m", "--multirun", "-r", "--run", "hydra.mode"} & {_key(word) for word in arguments}
    names = [word.partition("=")[2] for word in arguments if _key(word) == "hparams_search"]
    return arguments if said or set(names) <= {"", "null"} else [*arguments, "--multirun"]


def with_resumed_overrides(arguments: list[str]) -> list[str]:
    """Let `resume=<run>` bring along the overrides that the run was started with; those given now win.

    Args:
        arguments: of the command line.
    """
    resumed = next((word.partition("=")[2] for word in arguments if word.startswith("resume=")), "").strip("'\"")
    saved = _overrides_of(resumed)
    if saved is None:
        return arguments
    # No fault strikes twice, and who types a command waits for it, unless they say so again.
    given = {_key(word) for word in arguments} | {"resume", "dry_run", "faults", "detach"}
    # A group chosen anew (cluster=inline) takes the old changes inside it (cluster.n_workers=4) along.
    given |= {"debug"} if "debug=faults" in saved else set()
    given |= {"results.root"} if "results.handler=client" in arguments else set()
    kept = [word for word in saved if not {_key(word), _key(word).split(".")[0]} & given]
    if secret := [word for word in kept if HIDDEN in word]:
        names = [word.partition("=")[0] for word in secret]
        raise ConfigError(
            f"resume={resumed}: the run was given {', '.join(names)}, which looks like a secret and is kept nowhere: "
            f"type {names[0]}=<value> again, or {names[0]}='${{oc.env:NAME}}', which is kept as it is"
        )
    return kept + arguments


def _overrides_of(run: str) -> list[str] | None:
    if "://" in run:  # what knows of stores is imported only where it is needed
        from ddp_hydra.storage import results_root

        run = results_root.plain_path(run)
        if results_root.is_url(run):
            try:
                content = results_root.folder(run).get(".hydra/overrides.yaml")
            except (FileNotFoundError, ConnectionError):  # checkpoints alone; or a store that is asked again
                return None
            return _words(OmegaConf.create(content.decode()))
    path = Path(run)
    folder = path if path.is_dir() else path.parent.parent  # <run>/checkpoints/<file>
    saved = folder / ".hydra" / "overrides.yaml"
    return _words(OmegaConf.load(saved)) if run and saved.is_file() else None


def _words(saved: Any) -> list[str]:
    """Return overrides as they were typed: an interpolation means what it does then."""
    return [str(word) for word in OmegaConf.to_container(saved) or ()]


def with_resumed_sweep(arguments: list[str]) -> list[str]:
    """Let `-m hydra.sweep.dir=<sweep>` alone go on with a sweep: the overrides that it was started with are kept there.

    Args:
        arguments: of the command line; `hydra.launcher.resume` means the same as `hydra.sweep.dir`.
    """
    if not {"-m", "--multirun"} & set(arguments):
        return arguments
    keys = ("hydra.launcher.resume", "hydra.sweep.dir")
    folders = [word.partition("=")[2].strip("'\"") for word in arguments if _key(word) in keys and "=" in word]
    saved = Path(folders[0]) / "multirun.yaml" if folders else None
    if saved is None or not saved.is_file():
        return arguments
    given = [word for word in arguments if _key(word) not in keys]
    if not any("=" in word and not _key(word).startswith("hydra") for word in given):
        before = OmegaConf.load(saved).hydra.overrides
        given += [
            word
            for word in (*_words(before.hydra), *_words(before.task))
            if _key(word) not in (*keys, *map(_key, given))
        ]
    return [*given, f"hydra.sweep.dir='{folders[0]}'"]


def with_faults(arguments: list[str]) -> list[str]:
    """Let `+fault=kill,rank=1,step=20` be typed as it is: Hydra takes commas for a sweep.

    Args:
        arguments: of the command line.
    """
    given = [word for word in arguments if word.startswith(("+fault=", "fault="))]
    if not given:
        return arguments
    texts = [re.sub("['\"]", "", word.partition("=")[2]) for word in given]
    quoted = ",".join(f"'{text}'" for text in texts)
    return [word for word in arguments if word not in given] + [f"faults=[{quoted}]"]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition("@")[0]
