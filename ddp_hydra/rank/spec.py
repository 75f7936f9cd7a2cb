"""Describes a job: the same struct on the client, in the workers' tasks and in the ranks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

import ddp_hydra
from ddp_hydra.checked import prepare
from ddp_hydra.config.project import Project
from ddp_hydra.errors import ConfigError

FORMAT = 2
"""Grows with each change of the structs below."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's place in its gang.

    Args:
        rank: global rank, 0 … world_size - 1.
        world_size: number of ranks in the gang.
        local_rank: rank among the ranks of the same host.
        local_world_size: number of ranks on that host.
        node_rank: number of the host, in order of rank.
        worker: address of the Dask worker that starts the rank; it may start several.
        host: the host's address, as the other workers reach it.
        nodes: number of hosts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    worker: str
    host: str
    nodes: int = 1


class GangSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a gang is dispatched, watched and restarted, and how its ranks work.

    The arguments that are not listed here mean what the comments in conf/dispatch/default.yaml say, with None for null.

    Args:
        name: name that Dask's dashboard and `ps` show; it is made unique.
        group: whether to initialise the process group for functions; if False, they do it themselves, as scripts do.
        threads: CPU threads per rank; 0 shares each host's cores among all ranks.
        data_workers: processes that make the batches of each rank: it takes their helper when it starts; None: on GPUs.
        retry_s: how long to wait for space where a worker's temporary folder is full.
        pip: requirements that each worker must have, in pip's syntax.
        grace_s: 0 ends the ranks at once.
        stop_s: seconds from SIGTERM to SIGKILL when ranks are stopped, in which a script may save something; None: 30
            for scripts, 0.5 for functions.
        keep_warm_s: None is 0.
        sweep: the sweep that this job belongs to, where several wait for workers.
        cwd: working folder of the ranks, where their host has it; "" for this process's.
    """

    name: str = "gang"
    ranks: int | None = None
    ranks_per_worker: int | str = 1
    backend: str = "auto"
    group: bool = True
    threads: int = 0
    data_workers: int | None = 0
    timeout_s: float = 1800.0
    retry_s: float = 60.0
    queue_timeout_s: float = 86400.0
    start_timeout_s: float = 300.0
    port_range: tuple[int, int] | None = None
    interface: str | None = None
    pip: tuple[str, ...] = ()
    max_restarts: int = 0
    min_ranks: int | None = None
    restart_wait_s: float = 60.0
    lost_timeout_s: float = 15.0
    hang_timeout_s: float = 300.0
    first_step_timeout_s: float = 1800.0
    grace_s: float = 0.0
    stop_s: float | None = None
    keep_warm_s: float | None = None
    sweep: str = ""
    cwd: str = ""

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> GangSettings:
        """Check settings by name.

        Raises:
            ConfigError: there is no such setting, or its value is of another type.
        """
        try:
            return msgspec.convert(dict(settings), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"a gang's settings are {', '.join(sorted(cls.__struct_fields__))}: {error}") from None


class JobSpec(Struct, frozen=True, kw_only=True):
    """What each host is sent of a gang's attempt, and what its ranks read.

    Args:
        gang: the gang's name, the same in all attempts.
        attempt: number of the gang's start.
        ranks: the places of the ranks; each worker starts its own.
        call: cloudpickle of (function or "module:name", args, kwargs).
        project: the packed project space, or None.
        settings: of the gang.
        ranks_on_host: host -> how many ranks the sweep runs there at once; it shares the cores among as many, so that
            all its jobs get equally many threads. Empty outside of a sweep.
        is_script: the call is a `Script`: it makes its process group itself, ends as a program does, and may save
            something when it gets SIGTERM.
        generation: how many worlds the attempt had before.
        lives_on: a rank that has lost the others waits for its next world, instead of ending.
        format, version: of the ddp_hydra that has made this.
    """

    gang: str
    attempt: int
    ranks: tuple[RankSpec, ...]
    call: bytes = b""
    project: Project | None = None
    settings: GangSettings = GangSettings()
    ranks_on_host: dict[str, int] = {}
    is_script: bool = False
    generation: int = 0
    lives_on: bool = False
    format: int = FORMAT
    version: str = ddp_hydra.__version__

    @property
    def topic(self) -> str:
        return f"{self.gang}-{self.attempt}" if self.attempt else self.gang

    @property
    def makes_group(self) -> bool:
        return self.settings.group and not self.is_script

    @property
    def stop_s(self) -> float:
        given = self.settings.stop_s
        return given if given is not None else 30.0 if self.is_script else 0.5

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """Read what a client has sent.

        Raises:
            ConfigError: the client has another version of ddp_hydra.
        """
        sender = ClientVersion()
        with contextlib.suppress(msgspec.MsgspecError):
            sender = msgspec.msgpack.decode(data, type=ClientVersion)
            if sender.format == FORMAT:
                return msgspec.msgpack.decode(data, type=cls)
        raise ConfigError(
            f"the client has ddp_hydra {sender.version} (format {sender.format}), and worker host "
            f"{socket.gethostname()} has {ddp_hydra.__version__} (format {FORMAT}): install the same version on both"
        )


class ClientVersion(Struct):
    """What any version can read of a job: which version has sent it."""

    format: int = 0
    version: str = "of an unknown version"


class RankLaunch(Struct, frozen=True, kw_only=True):
    """What a rank reads when its process starts.

    Args:
        job: with this rank alone, its own number of threads, and the project's hash without its archive.
        outbox: folder for files on their way to the client.
        worker_pid: process id of its Dask worker; 0 where that is the client's own process.
        nanny_pid: of the worker's nanny; 0 without one.
    """

    job: JobSpec
    outbox: str
    worker_pid: int = 0
    nanny_pid: int = 0

    @property
    def spec(self) -> RankSpec:
        return self.job.ranks[0]


prepare(GangSettings, JobSpec, ClientVersion, RankLaunch)
