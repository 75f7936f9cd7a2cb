"""What there is on a worker: versions, packages, network.

It is sent there as text, see `shipped.py`, so it imports the standard library and what Dask needs itself; and no torch,
which would take seconds.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
import sys
from importlib import metadata
from typing import Any

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def look(packages: list[str], requirements: list[str], dask_worker: Any = None) -> dict[str, Any]:
    """Look around. Runs on the worker, called by the client.

    Args:
        packages: names whose versions are wanted.
        requirements: as pip takes them.
        dask_worker: given by Dask.

    Returns:
        host, executable, versions ({name: version or None}, with "python"), missing ([[requirement, what is there]]),
        interfaces ({name: [addresses]}) and variables.
    """
    import psutil

    return {
        "host": socket.gethostname(),
        "executable": sys.executable,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "missing": [lack for text in requirements for lack in missing(text)],
        "interfaces": {
            name: [entry.address.partition("%")[0] for entry in addresses if entry.family in FAMILIES]
            for name, addresses in psutil.net_if_addrs().items()
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


FAMILIES = (socket.AF_INET, socket.AF_INET6)


def version(name: str) -> str | None:
    """The version of an installed package; None where there is none."""
    if name == "ddp_hydra":  # it may be a checkout on the path
        try:
            return str(importlib.import_module(name).__version__)
        except ImportError:
            return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(text: str, extra: str = "", seen: tuple[str, ...] = ()) -> list[list[str]]:
    """What of a requirement is not there.

    Args:
        text: e.g. "timm>=1.0" or "ddp-hydra[s3]; python_version>'3.10'".
        extra: which its marker may ask for.
        seen: what is being looked at already: extras may name each other.

    Returns:
        Pairs of a requirement, and what is there instead.
    """
    from packaging.requirements import Requirement

    wanted = Requirement(text)
    if text in seen or (wanted.marker and not wanted.marker.evaluate({"extra": extra})):
        return []
    try:
        found = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return [[_without_marker(wanted), "not installed"]]
    if not wanted.specifier.contains(found.version, prereleases=True):
        return [[_without_marker(wanted), f"{found.version} is installed"]]
    lacks = []
    for part in sorted(wanted.extras):
        if part.replace("_", "-").lower() not in [
            name.replace("_", "-").lower() for name in found.metadata.get_all("Provides-Extra") or []
        ]:
            lacks.append([_without_marker(wanted), f"{found.version} has no extra {part}"])
        for line in found.requires or []:
            marker = Requirement(line).marker
            if marker and not marker.evaluate({"extra": ""}):  # it belongs to an extra
                lacks += missing(line, part, (*seen, text))
    return lacks


def _without_marker(requirement: Any) -> str:
    return str(requirement).partition(";")[0].strip()
