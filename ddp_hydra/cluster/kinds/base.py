"""What is to know about a kind of cluster; `Manager` itself knows what holds for any Dask cluster class."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.errors import ClusterError

OURS = {"n_workers": None, "wait_timeout_s": 60.0, "keep": False, "client_timeout_s": 60.0, "pip": None}
"""Keys of every cluster's config that mean the same for all, and what they are where they are not given."""
EXTRAS = {
    "asyncssh": "ssh",
    "dask_cuda": "gpu",
    "dask_gateway": "gateway",
    "dask_jobqueue": "slurm",
    "dask_kubernetes": "kubernetes",
    "dask_saturn": "saturn",
}
"""Package -> the extra of ours that installs it."""


class Manager:
    """Brings up one cluster.

    Args:
        cfg: `_target_`, the native arguments of that class, and our own keys.
        logs: folder for what its workers print, where it does not come here; None where there is no such folder.

    Raises:
        ClusterError: a key has no value that needs one.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that the class imports only when it is used."""
    is_watched: ClassVar[bool] = True
    """Whether its scheduler, where that is not in our process, ends the cluster when we are killed."""
    look_at: ClassVar[str] = ""
    """Where to look when it does not come up."""

    def __init__(self, cfg: DictConfig, logs: Path | None = None) -> None:
        self.logs = logs
        try:
            given = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, enum_to_str=True)
        except MissingMandatoryValue as error:
            key = f"cluster.{str(error.full_key).removeprefix('cluster.')}"
            raise ClusterError(f"{key} is missing: give {key}=...") from None
        assert isinstance(given, dict)
        ours = {key: given.pop(key, default) for key, default in OURS.items()}
        self.target = str(given.pop("_target_", "?"))
        self.arguments = {str(key): value for key, value in given.items()}
        self.n_workers: int | None = ours["n_workers"]
        self.wait_timeout_s, self.client_timeout_s = float(ours["wait_timeout_s"]), float(ours["client_timeout_s"])
        self.keep = bool(ours["keep"])

    @property
    def name(self) -> str:
        """Of its class."""
        return self.target.rpartition(".")[2]

    @property
    def expected(self) -> int:
        """How many workers to wait for."""
        return self.n_workers or 1

    # -- before anything is started ------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ClusterError: with what to install, or what to give instead.
        """
        for package in (self.target.partition(".")[0], *self.needs):
            if is_missing(package):
                extra = EXTRAS.get(package)
                install = f"pip install 'ddp-hydra[{extra}]'" if extra else f"it is in cluster._target_={self.target}"
                raise ClusterError(f"{self.name} needs the package {package}, which is not installed here: {install}")
        if self.keep and not self.can_keep:
            raise ClusterError(
                f"cluster.keep=true: the scheduler of a {self.name} ends with the process that started it. To keep "
                "workers for the next job, start `dask scheduler` and `dask worker` yourself and give cluster=remote "
                "cluster.address=tcp://<host>:8786; a sweep (-m) has one cluster for all its jobs anyway"
            )

    @property
    def can_keep(self) -> bool:
        """Whether it can go on without us."""
        return "shutdown_on_close" in self.accepted

    @property
    def accepted(self) -> Mapping[str, inspect.Parameter]:
        """The arguments that its class names."""
        try:
            with signals_kept():
                return inspect.signature(get_object(self.target)).parameters
        except (ImportError, AttributeError, TypeError, ValueError):
            return {}  # `open` will say what is wrong

    # -- bringing it up, and taking it down ----------------------------------------------------------------

    def open(self) -> Any:
        """Start it; returns what ends it, as a context manager."""
        arguments = dict(self.arguments)
        if self.n_workers is not None and "n_workers" in self.accepted:
            arguments["n_workers"] = self.n_workers
        if "shutdown_on_close" in self.accepted:
            arguments.setdefault("shutdown_on_close", True)
        return self.call(self.target, arguments)

    def call(self, target: str, arguments: Mapping[str, Any]) -> Any:
        """Call a class or function, with lists and dicts as Python knows them."""
        with signals_kept():
            return instantiate({"_target_": target, "_convert_": "all", **arguments})

    def client(self, cluster: Any) -> Any:
        """Connect; returns the `distributed.Client`."""
        return cluster.get_client()

    def size(self, cluster: Any, workers: int) -> None:
        """Ask for as many workers as are wanted, where the class was not told.

        Args:
            cluster: as it came up.
            workers: how many are there already.
        """
        if self.n_workers is not None and "n_workers" not in self.accepted and hasattr(cluster, "scale"):
            cluster.scale(self.n_workers)

    def again(self, cluster: Any) -> str:
        """What to type to use a cluster again that is left running."""
        name = getattr(cluster, "name", None)
        if name is None:
            return f"cluster=remote cluster.address={cluster.scheduler_address}"
        return f"cluster.name={shlex.quote(str(name))}"

    # -- where something goes wrong ------------------------------------------------------------------------

    def explain(self, error: BaseException) -> str:
        """Say why it did not come up."""
        hint = f": {self.look_at}" if self.look_at else ""
        return f"cluster {self.target} could not be started: {str(error) or repr(error)} ({type(error).__name__}){hint}"

    def refused(self, cluster: Any) -> str:
        """Say why workers will not come, however long one waits; "" where they may."""
        return ""

    def ask(self, cluster: Any) -> str:
        """What it says about workers that don't come; "" for nothing."""
        return ""


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Leave Ctrl-C what it is: dask-jobqueue has it call sys.exit from the moment it is imported."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is not before and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def is_missing(package: str) -> bool:
    """Whether a package is not installed; looks without importing it."""
    try:
        return importlib.util.find_spec(package) is None
    except ValueError:  # a module that was made by hand, as __main__ of a sweep's processes
        return False
