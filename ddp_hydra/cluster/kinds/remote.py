"""A cluster that was started by somebody else, and that stays."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ddp_hydra.cluster.connection import GIVE, POLL_S, Scheduler, await_scheduler, check_certificates, load
from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.errors import ClusterError

CONNECT_S = 10.0
"""Seconds that the scheduler may take to answer, and its file to appear."""


@dataclass(eq=False, repr=False)
class Remote:
    """`cluster=remote`: a scheduler that was started by somebody else, and that stays after the job.

    Args:
        address: tcp://host:8786, or tls://host:8786.
        scheduler_file: instead of the address, the file that `dask scheduler --scheduler-file` wrote.
        security: tls_ca_file, tls_client_cert, tls_client_key and other arguments of `distributed.Security`; None for
            the settings of Dask's own config.
    """

    address: str | None = None
    scheduler_file: str | None = None
    security: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the cluster as it is."""

    def get_client(self) -> Any:
        """Connect; clusters of Dask have a method of this name, too.

        Raises:
            ClusterError: there is no such scheduler, or it refuses the connection.
        """
        load()
        address = self.address or read_address(Path(str(self.scheduler_file)))
        security = make_security(self.security)
        if address.startswith("tls://"):
            check_certificates(security)
        await_scheduler(address, security, CONNECT_S)
        return Scheduler(address, security, timeout_s=CONNECT_S).client()


class RemoteManager(Manager):
    """Connects to a `Remote`."""

    needs_idle_shutdown = False
    can_keep = True

    def check(self) -> None:
        """Check that exactly one of address and scheduler_file is given."""
        super().check()
        if bool(self.arguments.get("address")) == bool(self.arguments.get("scheduler_file")):
            raise ClusterError(
                "cluster=remote: give cluster.address=tcp://<host>:8786, as `dask scheduler` prints it, or "
                "cluster.scheduler_file=<file>, as `dask scheduler --scheduler-file <file>` writes it"
            )

    def scale(self, cluster: Any, workers: int) -> None:
        """Leave the number of workers as it is."""


def make_security(given: Mapping[str, Any] | None) -> Any:
    """Make a `distributed.Security` from a config; the rest comes from Dask's own config."""
    from distributed import Security

    values = {key: value for key, value in (given or {}).items() if value is not None}
    try:
        return Security(**({"require_encryption": True, **values} if values else {}))
    except (TypeError, ValueError) as error:  # without the values: a private key may be among them
        raise ClusterError(f"cluster.security: {error}: give {GIVE}, or what else distributed.Security takes") from None


def read_address(file: Path) -> str:
    """Read a scheduler's address from the file that it wrote; wait a moment for one that is starting."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except FileNotFoundError:
            reason = "there is no such file"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        except (KeyError, TypeError, ValueError):
            reason = "this is not a file that a scheduler has written"
        if time.monotonic() > deadline:
            raise ClusterError(
                f"cluster.scheduler_file={file}: {reason}: start one with `dask scheduler --scheduler-file {file}`, in "
                "a folder that this machine sees, too; or give cluster.address=tcp://<host>:8786"
            )
        time.sleep(POLL_S)
