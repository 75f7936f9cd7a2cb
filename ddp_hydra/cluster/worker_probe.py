"""Looks up what a worker has: versions, packages, network interfaces.

The module is sent to the worker as text, see `BySource`, so it imports only the standard library and what Dask
itself needs. It does not import torch, which would take seconds. Dask's `Client.get_versions` is not enough: it does
not find a ddp_hydra that is a checkout on the path, and it looks up neither requirements nor interfaces.
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


def probe(packages: list[str], requirements: list[str], dask_worker: Any = None) -> dict[str, Any]:
    """Look up versions, missing requirements and the network. Runs on the worker, called by the client.

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
    if name == "ddp_hydra":  # may be a checkout on the path, without metadata
        try:
            return str(importlib.import_module(name).__version__)
        except ImportError:
            return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(text: str, extra: str = "", seen: tuple[str, ...] = ()) -> list[list[str]]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    wanted = Requirement(text)
    shown = str(wanted).partition(";")[0].strip()  # without its marker
    if text in seen or (wanted.marker and not wanted.marker.evaluate({"extra": extra})):
        return []
    try:
        found = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return [[shown, "not installed"]]
    if not wanted.specifier.contains(found.version, prereleases=True):
        return [[shown, f"{found.version} is installed"]]
    lacks = []
    extras = list(map(canonicalize_name, found.metadata.get_all("Provides-Extra") or []))
    for part in sorted(wanted.extras):
        if canonicalize_name(part) not in extras:
            lacks.append([shown, f"{found.version} has no extra {part}"])
        for line in found.requires or []:
            marker = Requirement(line).marker
            if marker and not marker.evaluate({"extra": ""}):  # it belongs to an extra
                lacks += missing(line, part, (*seen, text))
    return lacks
