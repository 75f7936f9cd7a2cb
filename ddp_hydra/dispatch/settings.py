"""Settings of a gang: the one place where they are documented for users of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client

from ddp_hydra.config.project import Project
from ddp_hydra.results import Record


@dataclass
class Settings:
    """Say how a gang is dispatched, watched and started again.

    Args:
        client: of the Dask cluster.
        ranks: number of ranks; None for one on each worker.
        name: shown by Dask's dashboard and `ps`; made unique.
        backend: gloo, nccl, or auto (by device).
        group: whether functions find the process group initialised; False leaves that to them, as to scripts.
        project: packed project space that the ranks import from.
        on_record: called with each record, on a thread of its own, in each rank's order; a file that it does not
            `fetch` is dropped. Without it, what ranks send is counted, and said to be dropped.
        threads: CPU threads per rank; 0 shares each host's cores out.
        timeout_s: of the ranks' collectives.
        retry_s: how long room is waited for where a worker's temporary folder is full.
        queue_timeout_s: how long to wait for workers that other jobs hold.
        start_timeout_s: how long the ranks may take to come up.
        port_range: ports allowed for the rendezvous; None for any free one.
        interface: network interface by which the ranks reach each other; None for that of the workers' addresses.
        files: files of the client that rank 0 needs, see `Call`.
        pip: requirements that each worker must have, as pip takes them.
        max_restarts: new attempts after failures.
        first_attempt: number of the first; the others count on from it.
        goes_on: returns where a new attempt begins, in words, given the steps that the last one has done.
        min_ranks: go on with fewer ranks, but never with fewer than this; None for as many as at first.
        restart_wait_s: how long to wait for lost workers to come back or be replaced.
        lost_timeout_s: a worker of which nothing is heard for so long is lost.
        hang_timeout_s: a rank that says where it is (`pulse.at`) and makes no progress for so long hangs.
        first_step_timeout_s: the same where it is in a phase for the first time.
        grace_s: after Ctrl-C or SIGTERM, how long ranks may take to finish; 0 ends them at once.
        sweep: whose job it is, where several wait for workers.
        on_give_up: called when the user ends it at once: `on_record` should not wait for anything any more.
        cwd: the folder of ranks whose host has it, too; "" for this process's.
    """

    client: Client
    ranks: int | None = None
    name: str = "gang"
    backend: str = "auto"
    group: bool = True
    project: Project | None = None
    on_record: Callable[[Record], None] | None = field(default=None, repr=False)
    threads: int = 0
    timeout_s: float = 1800.0
    retry_s: float = 60.0
    queue_timeout_s: float = 86400.0
    start_timeout_s: float = 300.0
    port_range: tuple[int, int] | None = None
    interface: str | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    pip: Sequence[str] = ()
    max_restarts: int = 0
    first_attempt: int = 0
    goes_on: Callable[[int], str] = field(default=lambda done: "", repr=False)
    min_ranks: int | None = None
    restart_wait_s: float = 60.0
    lost_timeout_s: float = 15.0
    hang_timeout_s: float = 300.0
    first_step_timeout_s: float = 1800.0
    grace_s: float = 0.0
    sweep: str = ""
    on_give_up: Callable[[], None] = field(default=lambda: None, repr=False)
    cwd: str = ""
