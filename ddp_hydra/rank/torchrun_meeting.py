"""Brings the ranks of torchrun together: they meet at its store, and rank 0 tells the others what only it knows.

Anybody who reaches the store can write to it. So only plain data is read from it, and no code: each rank runs the
config that it has composed itself, which has to be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError
from ddp_hydra.rank.spec import RankSpec

if TYPE_CHECKING:
    from torch.distributed import Store

CHOICES = "choices"
"""Key of the store under which rank 0 publishes what only it knows."""
MAX_NAMED = 5
"""Config keys that a message names; the rest are counted."""


@dataclass(frozen=True)
class Choices:
    """Holds what rank 0 tells the others.

    Args:
        files: paths of files on its host, by name.
        arguments: fingerprints of its arguments.
        attempt: number of the attempt.
        server: where the processes of the other ranks find the process of rank 0; see `torchrun_channel.connect`.
        numbers: by dotted keys, what all ranks take instead of what they have composed, after a restart.
    """

    files: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    attempt: int = 0
    server: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, bool | int] = field(default_factory=dict)


def meet(spec: RankSpec, wait_s: float, timeout_s: float) -> Store:
    """Connect to the store that torchrun's variables point to, served by itself or by rank 0.

    Raises:
        ClusterError: rank 0 or another rank does not come.
    """
    from torch.distributed import DistError, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        place = rendezvous("env://", spec.rank, spec.world_size, timeout=timedelta(seconds=wait_s))
        store: Store = next(place)[0]
    except DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ClusterError(
            f"rank {spec.rank} of {spec.world_size} did not meet the others at {where} in {wait_s:g} s: start all of "
            "them, with the same MASTER_ADDR and MASTER_PORT, or wait longer with cluster.wait_timeout_s="
            f"{round(3 * wait_s) or 60}. {str(error).partition(chr(10))[0]}"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    # torchrun's store outlives its restarts, and so would the keys of an attempt.
    return PrefixStore(f"ddp_hydra/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(store: Store, spec: RankSpec, mine: Choices, wait_s: float) -> Choices:
    """Give all ranks the choices of rank 0.

    Raises:
        ClusterError: rank 0 does not publish them.
        DdpHydraError: the data in the store does not come from a rank 0.
    """
    if spec.rank == 0:
        if spec.world_size > 1:
            store.set(CHOICES, msgspec.json.encode(mine).decode())
        return mine
    try:
        store.wait([CHOICES], timedelta(seconds=wait_s))
    except RuntimeError as error:  # of torch: the time is over, or the store has ended
        raise ClusterError(
            f"rank {spec.rank} of {spec.world_size} has heard nothing of rank 0 ({str(error).partition(chr(10))[0]}): "
            f"look at what rank 0 says, or wait longer with cluster.wait_timeout_s={round(3 * wait_s) or 60}"
        ) from error
    try:
        return msgspec.json.decode(store.get(CHOICES), type=Choices)
    except ValueError as error:
        raise DdpHydraError(f"rank {spec.rank} can't read the files and arguments of rank 0: {error!r:.200}") from None


def fingerprints(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, (Mapping, list, tuple)) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {key: its for part, inner in items for key, its in fingerprints(inner, f"{name}.{part}").items()}
    return {name: hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]}


def check_same(mine: dict[str, str], theirs: dict[str, str], spec: RankSpec) -> None:
    """Check that this rank has the same arguments as rank 0.

    Raises:
        ConfigError: names those that differ.
    """
    names = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
    if names:
        differing = ", ".join(sorted(name.lstrip(".0123456789") for name in names)[:MAX_NAMED])
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise ConfigError(
            f"rank {spec.rank} on {spec.host} has composed another config than rank 0: {differing}{more} differ. Type "
            "the same command on all hosts, with the same conf/, and give such keys a value that does not depend on "
            "the host or the time, e.g. data.root=<folder>"
        )
