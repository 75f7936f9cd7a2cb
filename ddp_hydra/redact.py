"""What of a config looks like a secret, and configs without it: for tables and stores that others read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SECRET = {
    "auth", "authorization", "cookie", "credential", "credentials", "key", "passphrase", "passwd", "password", "pw",
    "pwd", "secret", "signature", "token",
}  # fmt: skip
HIDDEN = "***"
_WORD = re.compile(r"([\w./]+)=([^,\s]+)")
"""An override inside a text, such as hydra.job.override_dirname."""


def named_secret(name: str) -> bool:
    """Whether a key, "cluster.auth.password", is called like a secret."""
    words = re.sub("([a-z])([A-Z])", r"\1_\2", re.split("[./]", name)[-1]).lower()
    return not SECRET.isdisjoint(re.split("[^a-z]+", words)) or "apikey" in words or "password" in words


def holds_secret(value: object) -> bool:
    """Whether a value has a key inside that is called like a secret."""
    if isinstance(value, dict):
        return any(named_secret(str(key)) or holds_secret(inner) for key, inner in value.items())
    return isinstance(value, list) and any(holds_secret(inner) for inner in value)


def bare(text: str) -> str:
    """Without what an address may hold of secrets: user and password, and the query of a signed one."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", re.sub(r"(://[^?\s]*)\?[^\s'\",\]}]*", r"\1", text))


def hydra_files(folder: Path) -> dict[str, bytes]:
    """What Hydra has saved of a job, by name, without secrets. Interpolations stay what they are.

    Args:
        folder: its `.hydra`.
    """
    return {
        path.name: OmegaConf.to_yaml(OmegaConf.create(_without(OmegaConf.to_container(OmegaConf.load(path))))).encode()
        for path in sorted(folder.glob("*.yaml"))
    }


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(inner) if named_secret(str(key)) else _without(inner) for key, inner in value.items()}
    if isinstance(value, list):  # overrides are such, and one that is left out is none that could be used
        return [_without(inner) for inner in value if not (isinstance(inner, str) and _gives_secret(inner))]
    return _WORD.sub(_word, bare(value)) if isinstance(value, str) else value


def _word(match: re.Match[str]) -> str:
    return match[0] if not named_secret(match[1]) else f"{match[1]}={HIDDEN}"


def _hidden(value: Any) -> Any:
    return value if value is None or (isinstance(value, str) and value.startswith("${")) else HIDDEN


def _gives_secret(word: str) -> bool:
    name, given, _ = word.partition("=")
    return bool(given) and named_secret(name.partition("@")[0])
