"""A cluster that somebody else has started, and that stays."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ddp_hydra.cluster.connection import GIVE, POLL_S, Scheduler, await_scheduler, check_certificates, load
from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.errors import ClusterError

CONNECT_S = 10.0
"""How long the scheduler may take to answer, and its file to appear."""


class Remote:
    """`cluster=remote`: a scheduler that somebody else has started, and that stays when the job has ended.

    Args:
        address: tcp://host:8786, or tls://host:8786.
        scheduler_file: the file that `dask scheduler --scheduler-file` wrote, instead of the address.
        security: tls_ca_file, tls_client_cert, tls_client_key and what else `distributed.Security` takes; None for
            what Dask's own config says.
    """

    def __init__(
        self, address: str | None = None, scheduler_file: str | None = None, security: Mapping[str, Any] | None = None
    ) -> None:
        self.address, self.scheduler_file, self.given = address, scheduler_file, security

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it as it is."""

    def get_client(self) -> Any:
        """Connect, as to clusters of Dask's own.

        Raises:
            ClusterError: there is no such scheduler, or it does not want us.
        """
        load()
        address = self.address or read_address(Path(str(self.scheduler_file)))
        security = make_security(self.given)
        if address.startswith("tls://"):
            check_certificates(security)
        await_scheduler(address, security, CONNECT_S)
        return Scheduler(address, security, timeout_s=CONNECT_S).client()


class Remotely(Manager):
    """Connects to a `Remote`."""

    is_watched = False
    can_keep = True

    def check(self) -> None:
        """Look whether it is said where the scheduler is."""
        super().check()
        if bool(self.arguments.get("address")) == bool(self.arguments.get("scheduler_file")):
            raise ClusterError(
                "cluster=remote: give cluster.address=tcp://<host>:8786, as `dask scheduler` prints it, or "
                "cluster.scheduler_file=<file>, as `dask scheduler --scheduler-file <file>` writes it"
            )

    def size(self, cluster: Any, workers: int) -> None:
        """It has as many workers as it has."""


def make_security(given: Mapping[str, Any] | None) -> Any:
    """Make a `distributed.Security` of what a config says, and of Dask's own config for the rest."""
    from distributed import Security

    values = {key: value for key, value in (given or {}).items() if value is not None}
    try:
        return Security(**({"require_encryption": True, **values} if values else {}))
    except (TypeError, ValueError) as error:
        raise ClusterError(
            f"cluster.security={dict(values)}: {error}: give {GIVE}, or what else distributed.Security takes"
        ) from None


def read_address(file: Path) -> str:
    """Read where a scheduler is from the file that it has written; one that is starting has a moment to do so."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except FileNotFoundError:
            why = "there is no such file"
        except OSError as error:
            why = (error.strerror or str(error)).lower()
        except (KeyError, TypeError, ValueError):
            why = "this is no file that a scheduler has written"
        if time.monotonic() > deadline:
            raise ClusterError(
                f"cluster.scheduler_file={file}: {why}: start one with `dask scheduler --scheduler-file {file}`, in a "
                "folder that this machine sees, too; or give cluster.address=tcp://<host>:8786"
            )
        time.sleep(POLL_S)
