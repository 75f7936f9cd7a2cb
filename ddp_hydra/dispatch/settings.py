"""Settings of a gang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client

from ddp_hydra.config.project import Project
from ddp_hydra.record import Record


@dataclass
class Settings:
    """Configures how a gang is dispatched, watched and restarted.

    The arguments that are not listed here mean what the comments in conf/dispatch/default.yaml say, with None for null.

    Args:
        client: client of the Dask cluster.
        name: name that Dask's dashboard and `ps` show; it is made unique.
        group: whether to initialise the process group for functions; if False, they do it themselves, as scripts do.
        project: packed project space that the ranks import from.
        on_record: called with each record, on a thread of its own, in each rank's order; a file that it does not
            `fetch` is dropped. Without it, records are counted, and a warning says that they were dropped.
        run_dir: a folder of this machine for what the function prints and sends with `results.*`. It becomes what a job
            leaves: metrics.jsonl, tensorboard/, checkpoints/, submitted files, logs/rank-<r>.log, and at the end
            summary.json. It holds one run; after a failure or an interruption, it may be given again.
        threads: CPU threads per rank; 0 shares each host's cores among all ranks.
        data_workers: processes that make the batches of each rank: it takes their helper when it starts; None: on GPUs.
        retry_s: how long to wait for space where a worker's temporary folder is full.
        files: files of the client that rank 0 needs, see `Call`.
        pip: requirements that each worker must have, in pip's syntax.
        first_attempt: number of the first attempt; the others count on from it.
        goes_on: returns, in words, where a new attempt begins, given the steps that the last attempt has done.
        hang_timeout_s: only ranks that report their phase (`heartbeat.at`) can hang.
        grace_s: 0 ends the ranks at once.
        keep_warm_s: None is 0.
        sweep: the sweep that this job belongs to, where several wait for workers.
        on_give_up: called when the user ends the job at once: `on_record` should stop waiting for anything.
        cwd: working folder of the ranks, where their host has it; "" for this process's.

    Attributes:
        stop: asks a gang that runs in the background to end.
    """

    client: Client
    ranks: int | None = None
    ranks_per_worker: int | str = 1
    name: str = "gang"
    backend: str = "auto"
    group: bool = True
    project: Project | None = None
    on_record: Callable[[Record], None] | None = field(default=None, repr=False)
    run_dir: str | Path | None = None
    threads: int = 0
    data_workers: int | None = 0
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
    keep_warm_s: float | None = None
    sweep: str = ""
    on_give_up: Callable[[], None] = field(default=lambda: None, repr=False)
    cwd: str = ""
    stop: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
