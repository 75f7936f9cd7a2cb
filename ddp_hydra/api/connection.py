"""Keeps a cluster for several jobs of this process."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from ddp_hydra.cli import overrides
from ddp_hydra.cli.compose import compose
from ddp_hydra.cluster import connect as cluster
from ddp_hydra.cluster.connection import Scheduler, workers_of
from ddp_hydra.config import redact
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import write_atomic


class ComposedConfig:
    """Holds the config of a job.

    Args:
        words: overrides, as they are typed in a command line: "optimizer.lr=0.1".
        config_name: the main config.

    Attributes:
        cfg: the config, without Hydra's own part.
        overrides: of the job, after the overrides of a run that it resumes.
        run_dir: the folder for its results.

    Raises:
        ConfigError: an argument is not an override.
        HydraException: there is no such config, or a value has the wrong type.
    """

    def __init__(self, words: Sequence[str], config_name: str = "config") -> None:
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"overrides are {words!r}, and must be a list of texts: ['model=resnet18', 'seed=1']")
        if options := [word for word in words if word.startswith("-")]:
            raise ConfigError(f"{options[0]} is an option of the command; from Python only overrides are taken")
        cfg = compose(overrides.read(list(words)), config_name)
        self.overrides: list[str] = list(cfg.hydra.overrides.task)
        self.run_dir = Path(cfg.hydra.run.dir)
        self._hydra = OmegaConf.masked_copy(cfg, "hydra")
        with open_dict(cfg):
            del cfg["hydra"]
        self.cfg = cfg

    def save(self) -> None:
        """Write `.hydra/` of the run directory, without secrets, as Hydra does for the command."""
        files = {"config.yaml": self.cfg, "hydra.yaml": self._hydra, "overrides.yaml": OmegaConf.create(self.overrides)}
        folder = self.run_dir / ".hydra"
        folder.mkdir(parents=True, exist_ok=True)
        for name, config in files.items():
            write_atomic(folder / name, redact.yaml_text(config).encode())


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
        cfg = ComposedConfig(overrides).cfg.cluster
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
        workers = len(workers_of(self.client))
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
