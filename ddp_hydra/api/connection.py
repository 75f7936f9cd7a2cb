"""Keeps a cluster for several jobs of this process."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ddp_hydra.api.compose import Composed
from ddp_hydra.cluster import connect as cluster
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.errors import ConfigError

_open: list[Connection] = []


class Connection:
    """Holds a cluster on which the jobs of this process run until it is closed; see `connect`.

    Args:
        overrides: choose the cluster.

    Attributes:
        client: the `distributed.Client`.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        if _open:
            raise ConfigError("there is a cluster already: close it with .close() before another one is started")
        self._stack = ExitStack()
        cfg = Composed(overrides).cfg.cluster
        if cluster.is_inline(cfg):
            raise ConfigError("cluster=inline is not a cluster: leave connect out")
        try:
            self.client: Any = cluster.start(cfg, self._stack, notify=print)
            cluster.use_existing(Scheduler(self.client.scheduler.address, self.client.security))
        except BaseException:
            self._stack.close()
            raise
        _open.append(self)
        atexit.register(self.close)

    @property
    def dashboard_link(self) -> str:
        """The address of Dask's dashboard."""
        return str(self.client.dashboard_link)

    def close(self) -> None:
        """End the cluster."""
        if self in _open:
            _open.remove(self)
            atexit.unregister(self.close)
            cluster.use_existing(None)
            self._stack.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self not in _open:
            return "<Connection: closed>"
        workers = len(self.client.scheduler_info(n_workers=-1)["workers"])
        return f"<Connection: {workers} workers at {self.client.scheduler.address}>"


def connect(overrides: Sequence[str] = ()) -> Connection:
    """Start a cluster, or connect to one, and run the following jobs of this process on it.

    The second job on a warm cluster starts in a fraction of a second. Use it in a `with`, or call `close()`.

    Args:
        overrides: choose the cluster, as in the command line: ["cluster.n_workers=4"], ["cluster=remote", …].

    Raises:
        ConfigError: there is one already.
        ClusterError: it cannot be started, or too few workers came in time.
    """
    return Connection(overrides)
