"""Kinds of clusters. `Manager` starts and ends a cluster of any Dask class; each subclass is for one kind."""

from __future__ import annotations

import contextlib
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
from ddp_hydra.config.limits import NonNegativeSeconds, Switch, check_limits
from ddp_hydra.config.targets import is_installed
from ddp_hydra.errors import ClusterError

EXTRAS = {
    "asyncssh": "ssh",
    "dask_cuda": "gpu",
    "dask_gateway": "gateway",
    "dask_jobqueue": "slurm",
    "dask_kubernetes": "kubernetes",
    "dask_saturn": "saturn",
    "ray": "ray",
}
"""Package -> the extra of ddp-hydra that installs it."""
_LIMITS = {
    "wait_timeout_s": NonNegativeSeconds,
    "client_timeout_s": NonNegativeSeconds,
    "keep": Switch,
    "trust_network": Switch,
}
_PLAIN = (str, int, float, bool, bytes, list, dict, type(None))


class Manager:
    """Starts and ends one cluster.

    Args:
        cfg: `_target_`, the arguments of that class, and our own keys.
        logs: folder for the output of workers, where that does not come here; None for no folder.

    Raises:
        ClusterError: a mandatory key has no value.
        ConfigError: a value is not allowed.
    """

    required_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that the class imports only when it is used."""
    needs_idle_shutdown: ClassVar[bool] = True
    """Whether the scheduler, which is not in our process, has to end the cluster when we are killed."""
    hint: ClassVar[str] = ""
    """Advice for a cluster that does not start."""

    def __init__(self, cfg: DictConfig, logs: Path | None = None) -> None:
        self.logs = logs
        try:
            given: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, enum_to_str=True)
        except MissingMandatoryValue as error:
            key = f"cluster.{str(error.full_key).removeprefix('cluster.')}"
            raise ClusterError(f"{key} is missing: give {key}=...") from None
        given |= check_limits("cluster.", given, _LIMITS, strict=False)
        self.target = str(given.pop("_target_", "?"))
        self.n_workers: int | None = given.pop("n_workers", None)
        self.wait_timeout_s: float = given.pop("wait_timeout_s", 60.0)
        self.client_timeout_s: float = given.pop("client_timeout_s", 60.0)
        self.keep: bool = given.pop("keep", False)
        given.pop("pip", None)  # the workers are checked for it
        self.arguments: dict[str, Any] = given

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]

    @property
    def expected(self) -> int:
        return self.n_workers or 1

    # -- before anything is started ------------------------------------------------------------------------

    def check(self) -> None:
        for package in (self.target.partition(".")[0], *self.required_packages):
            if not is_installed(package):
                extra = EXTRAS.get(package)
                install = f"pip install 'ddp-hydra[{extra}]'" if extra else f"it is in cluster._target_={self.target}"
                raise ClusterError(f"{self.name} needs the package {package}, which is not installed here: {install}")
        if self.keep and not self.can_keep:
            raise ClusterError(
                f"cluster.keep=true: the scheduler of a {self.name} ends with the process that started it: start "
                "Dask yourself, and give cluster=remote cluster.address=tcp://<host>:8786"
            )

    @property
    def can_keep(self) -> bool:
        return "shutdown_on_close" in self.accepted

    @property
    def accepted(self) -> Mapping[str, inspect.Parameter]:
        try:
            with signals_kept():
                return inspect.signature(get_object(self.target)).parameters
        except (ImportError, AttributeError, TypeError, ValueError):
            return {}  # `open` reports the error

    # -- start and end -------------------------------------------------------------------------------------

    def open(self) -> Any:
        """Start the cluster; return a context manager that ends it."""
        arguments = dict(self.arguments)
        if self.n_workers is not None and "n_workers" in self.accepted:
            arguments["n_workers"] = self.n_workers
        if "shutdown_on_close" in self.accepted:
            arguments.setdefault("shutdown_on_close", True)
        return self.instantiate(self.target, arguments)

    def instantiate(self, target: str, arguments: Mapping[str, Any]) -> Any:
        objects = {key: value for key, value in arguments.items() if not isinstance(value, _PLAIN)}
        plain = {key: value for key, value in arguments.items() if key not in objects}
        with signals_kept():  # Hydra 1.4 takes no objects, such as a loop, in a node
            return instantiate({"_target_": target, "_convert_": "all", **plain}, **objects)

    def client(self, cluster: Any) -> Any:
        return cluster.get_client()

    def scale(self, cluster: Any, workers: int) -> None:
        if self.n_workers is not None and "n_workers" not in self.accepted and hasattr(cluster, "scale"):
            cluster.scale(self.n_workers)

    def reuse_with(self, cluster: Any) -> str:
        name = getattr(cluster, "name", None)
        if name is None:
            return f"cluster=remote cluster.address={cluster.scheduler_address}"
        return f"cluster.name={shlex.quote(str(name))}"

    # -- errors --------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> str:
        hint = f": {self.hint}" if self.hint else ""
        return f"cluster {self.target} could not be started: {str(error) or repr(error)} ({type(error).__name__}){hint}"

    def refusal(self, cluster: Any) -> str:
        """Say why workers will never come; "" if they still may."""
        return ""

    def status(self, cluster: Any) -> str:
        """Say what the cluster knows of workers that do not come; "" if nothing."""
        return ""


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Restore signal handlers after the block: dask-jobqueue replaces SIGINT's, Ray SIGTERM's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


class Inline:
    """`cluster=inline`: no cluster; one rank in this process."""
