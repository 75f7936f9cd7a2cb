"""Reaching a scheduler; where it can't be reached, saying why."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask

from ddp_hydra.console.signals import held_back
from ddp_hydra.errors import ClusterError

QUIET = {
    "logging.distributed": "warning",
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.monitor-interval": "2s",
    "distributed.deploy.lost-worker-timeout": "1h",
}
"""Dask at rest on the cores where ranks compute: watching itself, it takes 3 % of a core per process otherwise. And
nannies stay: Dask would close one whose worker is not there 15 s after it was lost, be it lost once more by then."""
NOBODY = "nobody listens there"
GIVE_ADDRESS = (
    "give the address that `dask scheduler` prints, cluster.address=tcp://<host>:<port> or tls://<host>:<port>"
)
POLL_S = 0.1
PROBE_S = 3.0
"""How long one look at why nobody answers may take."""
CERTIFICATES = ("tls_ca_file", "tls_client_cert", "tls_client_key")
GIVE = " ".join(f"cluster.security.{name}=<file>" for name in CERTIFICATES)


def load() -> None:
    """Import Dask's distributed, which sets up its loggers at that moment: from warnings on."""
    with held_back(), dask.config.set({"logging.distributed": QUIET["logging.distributed"]}):
        import distributed  # noqa: F401
    logging.getLogger("distributed.client").addFilter(_is_no_end)


def _is_no_end(record: logging.LogRecord) -> bool:
    """Whether a client shall log it: not that it was closed while it looked for a scheduler that is gone."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


@contextlib.contextmanager
def without_broadcasts() -> Iterator[None]:
    """Keep a scheduler of this process from logging each call that a worker did not answer: the caller knows."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("broadcast to ")

    logger = logging.getLogger("distributed.scheduler")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@dataclass(frozen=True)
class Scheduler:
    """Where a cluster that somebody else has brought up can be reached.

    Args:
        address: of its scheduler.
        security: for TLS, as Dask's clients take it; None for what Dask's own config says.
        sweep: on whose behalf workers are reserved there.
        timeout_s: how long it may take to answer.
    """

    address: str
    security: Any = None
    sweep: str = ""
    timeout_s: float = 30.0

    def client(self) -> Any:
        """Connect.

        Raises:
            ClusterError: it does not answer.
        """
        load()
        from distributed import Client

        with dask.config.set(QUIET):
            try:
                return Client(self.address, security=self.security, timeout=self.timeout_s)
            except Exception as error:  # OSError, RuntimeError, TypeError, AssertionError: whatever Dask's parts raise
                said = why_not(self.address, self.security) or f"the scheduler {self.address} does not answer: {error}"
                raise ClusterError(said) from error


def check_certificates(security: Any) -> None:
    """Refuse certificates that can't be read.

    Args:
        security: a `distributed.Security`; its values are files, or certificates themselves.

    Raises:
        ClusterError: a file is missing, or is not what it should be.
    """
    names = dict(zip(("ca_file", "cert", "key"), CERTIFICATES, strict=True))
    files = {names[kind]: value for kind, value in security.get_tls_config_for_role("client").items() if kind in names}
    files = {name: value for name, value in files.items() if value is not None and "\n" not in value}
    for name, file in files.items():
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise ClusterError(
                f"cluster.security.{name}={file}: {(error.strerror or 'cannot be read').lower()}: give {GIVE}"
            ) from None
    try:
        security.get_connection_args("client")
    except ssl.SSLError as error:
        given = ", ".join(f"{name}={file}" for name, file in files.items())
        raise ClusterError(
            f"cluster.security: these are no certificate and its key, in PEM format ({given}): {error.reason or error}"
        ) from None


def await_scheduler(address: str, security: Any, timeout_s: float) -> None:
    """Wait for a scheduler that may be starting; Dask itself would wait for ever for one that says nothing.

    Raises:
        ClusterError: nobody is there, or it is no scheduler, or it does not want us.
    """
    deadline = time.monotonic() + timeout_s
    while said := why_not(address, security):
        if NOBODY not in said or time.monotonic() > deadline:
            raise ClusterError(said)
        time.sleep(POLL_S)


def why_not(address: str, security: Any) -> str:
    """Say in one sentence why a scheduler can't be reached, and what to type; "" where it can, as far as one sees."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("tcp", "tls"):
        known = scheme in ("gateway", "inproc", "ws", "wss", "ucx", "ucxx")
        return "" if rest and known else f"cluster.address={address}: {GIVE_ADDRESS}"
    if not host or not port.isdigit():
        return f"cluster.address={address}: {GIVE_ADDRESS}"
    try:
        return _look(scheme, host.strip("[]"), int(port), security)
    except socket.gaierror:
        return f"cluster.address={address}: no host of this name is known here"
    except ConnectionRefusedError:
        return (
            f"cluster.address={address}: {NOBODY}. Is the scheduler up, and is this its port? `dask scheduler` prints "
            "the address to give"
        )
    except OSError as found:
        return (
            f"cluster.address={address}: no answer ({found}). Is there a firewall between? "
            "The client has to reach the scheduler's port, and nothing else"
        )


def _look(scheme: str, host: str, port: int, security: Any) -> str:
    """What somebody who listens does wrong, or what we do."""
    where = f"{host}:{port}"
    if scheme == "tcp":
        if _greets(host, port):
            return ""
        if _speaks_tls(host, port):
            return f"the scheduler at {where} speaks TLS: give cluster.address=tls://{where} {GIVE}"
        return f"cluster.address=tcp://{where}: who listens there is no Dask scheduler: {GIVE_ADDRESS}"
    if not _speaks_tls(host, port):
        return f"the scheduler at {where} does not speak TLS: give cluster.address=tcp://{where}"
    from distributed import Security

    security = security or Security()
    context = security.get_connection_args("client").get("ssl_context")
    if context is None:
        return f"the scheduler at {where} wants to see a certificate: give {GIVE}"
    files = security.get_tls_config_for_role("client") if hasattr(security, "tls_ca_file") else {}
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            encrypted.recv(1)  # with TLS 1.3, one learns only now whether one's own certificate was taken
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the scheduler at {where} is not signed by cluster.security.tls_ca_file="
            f"{files.get('ca_file')} ({error.verify_message}): give the CA's certificate that the scheduler was "
            "started with (--tls-ca-file)"
        )
    except (ssl.SSLError, ConnectionError) as error:
        said = getattr(error, "reason", None) or "it hangs up"
        return (
            f"the scheduler at {where} does not accept cluster.security.tls_client_cert={files.get('cert')} ({said}): "
            "give a certificate, with its key, that its CA has signed and that is still valid"
        )
    return ""


def _greets(host: str, port: int) -> bool:
    """Whether the other side speaks first, as Dask does."""
    with socket.create_connection((host, port), timeout=PROBE_S) as plain:
        try:
            return bool(plain.recv(1))
        except OSError:
            return False


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing is said over it: whether it would work is all we ask
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), timeout=PROBE_S) as plain:
        try:
            with contextlib.closing(context.wrap_socket(plain)):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except OSError:
            return False
