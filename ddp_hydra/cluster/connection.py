"""Connects to a scheduler, and says why where that fails; sends it functions as the source text of their module.

A function that is pickled by name needs ddp_hydra where it arrives. One that is pickled as code needs the very same
Python version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import getpass
import hashlib
import inspect
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
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
"""Settings of Dask under which it leaves the cores to the ranks; otherwise it spends 3 % of a core per process on
watching itself. The last one keeps nannies: Dask would close a nanny whose worker is not there 15 s after it was lost,
even if that worker came back and was lost again."""
REFUSED = "nobody listens there"
NO_SCHEDULER = "what listens there is no Dask scheduler, or one that is too busy to answer"
GIVE_ADDRESS = "give the address that `dask scheduler` prints, tcp://<host>:<port> or tls://<host>:<port>"
POLL_S = 0.1
PROBE_S = 3.0
"""Seconds that one connection of the diagnosis may take."""
RETRY_S = 3.0
"""Seconds in which connecting is tried again where no reason for its failure is found, as on a busy host."""
CERTIFICATES = ("tls_ca_file", "tls_client_cert", "tls_client_key")
GIVE = " ".join(f"cluster.security.{name}=<file>" for name in CERTIFICATES)


def load() -> None:
    """Import Dask's distributed, which sets the level of its loggers then: from warnings on."""
    with held_back(), dask.config.set({"logging.distributed": QUIET["logging.distributed"]}):
        import distributed  # noqa: F401
    logging.getLogger("distributed.client").addFilter(_was_not_cancelled)


def _was_not_cancelled(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


@contextlib.contextmanager
def without_messages(logger_name: str, beginning: str) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    logger = logging.getLogger(logger_name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def user_name() -> str:
    """Return the name of this user, for the name of a cluster or a sweep; the number where a container has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the second one from Python 3.13 on
        return str(os.getuid())


@dataclass(frozen=True)
class Scheduler:
    """A scheduler that runs already.

    Args:
        address: of the scheduler.
        security: for TLS, as Dask's clients take it; None for the settings of Dask's own config.
        sweep: name of the sweep for which workers are reserved there.
        timeout_s: how long the scheduler may take to answer.
        connected: a client that all jobs share; None: each has its own.
        expected: how many workers it was waited for; None: no number was asked for.
    """

    address: str
    security: Any = None
    sweep: str = ""
    timeout_s: float = 30.0
    connected: Any = None
    expected: int | None = None

    def client(self) -> Any:
        if self.connected is not None:
            return contextlib.nullcontext(self.connected)
        load()
        from distributed import Client

        with dask.config.set(QUIET):
            until = time.monotonic() + RETRY_S
            while True:
                with held_back():
                    gc.collect()  # a client of before closes itself here: while another starts, it would wait for it
                try:
                    return Client(self.address, security=self.security, timeout=self.timeout_s)
                except Exception as error:  # OSError, RuntimeError, TypeError, AssertionError: whatever Dask raises
                    known = diagnose(self.address, self.security)
                    if known or time.monotonic() > until:
                        said = str(error) or type(error).__name__
                        raise ClusterError(known or f"the scheduler {self.address} does not answer: {said}") from error
                time.sleep(POLL_S)


def check_certificates(security: Any) -> None:
    given = security.get_tls_config_for_role("client")
    kinds = zip(CERTIFICATES, ("ca_file", "cert", "key"), strict=True)
    files = {name: given[kind] for name, kind in kinds if given[kind] is not None}  # or their text
    for name, file in files.items():
        if "\n" not in file and (not os.access(file, os.R_OK) or Path(file).is_dir()):
            raise ClusterError(f"cluster.security.{name}={file}: there is no file that can be read: give {GIVE}")
    try:
        security.get_connection_args("client")
    except OSError as error:  # also of `ssl`
        named = ", ".join(f"{name}={file}" for name, file in files.items() if "\n" not in file)
        raise ClusterError(
            f"cluster.security: {named or 'given as text'}: not the certificate of an authority, a certificate and its "
            f"key in PEM format, the key without a password: {getattr(error, 'reason', '') or error}: give {GIVE}"
        ) from None


def await_scheduler(address: str, security: Any, timeout_s: float) -> None:
    """Wait for a scheduler that may still be starting, or be busy.

    Dask itself would wait for ever where a program listens that says nothing.
    """
    deadline = time.monotonic() + timeout_s
    while reason := diagnose(address, security):
        if not (REFUSED in reason or NO_SCHEDULER in reason) or time.monotonic() > deadline:
            raise ClusterError(reason)
        time.sleep(POLL_S)


def diagnose(address: str, security: Any) -> str:
    """Say in one sentence why a scheduler cannot be reached, and what to type; "" where no reason is found.

    Dask's own errors do not tell these cases apart: most are "Timed out" or "Connection reset by peer".
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if rest and scheme in ("gateway", "inproc", "ws", "wss", "ucx", "ucxx"):
        return ""
    if scheme not in ("tcp", "tls") or not host or not port.isdigit():
        return f"cluster.address={address}: {GIVE_ADDRESS}"
    try:
        return _diagnose_listener(scheme, host.strip("[]"), int(port), security)
    except socket.gaierror:
        return f"cluster.address={address}: no host of this name is known here"
    except ConnectionRefusedError:
        return f"cluster.address={address}: {REFUSED}: {GIVE_ADDRESS}"
    except OSError as error:
        return f"cluster.address={address}: no answer ({error}). Is there a firewall between this port and the client?"


def _diagnose_listener(scheme: str, host: str, port: int, security: Any) -> str:
    """Say why whoever listens there and this client do not understand each other; "" where they do."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    no_scheduler = f"cluster.address={scheme}://{where}: {NO_SCHEDULER}: {GIVE_ADDRESS}"
    if scheme == "tcp":
        if _is_greeted(host, port) is None:
            return ""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing is sent over it, so nothing has to be verified
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        error = _is_greeted(host, port, context)
        if error is None or "ALERT" in str(getattr(error, "reason", "")):
            return f"the scheduler at {where} speaks TLS: give cluster.address=tls://{where} {GIVE}"
        return no_scheduler
    from distributed import Security

    security = security or Security()
    context = security.get_connection_args("client").get("ssl_context")
    if context is None:
        return f"the scheduler at {where} wants to see a certificate: give {GIVE}"
    given = security.get_tls_config_for_role("client") if hasattr(security, "tls_ca_file") else {}
    files = {kind: "<text>" if "\n" in str(value) else value for kind, value in given.items()}  # may hold a key
    error = _is_greeted(host, port, context)
    reason = getattr(error, "reason", None) or "it hangs up"
    if error is None:
        return ""
    if isinstance(error, TimeoutError):
        return no_scheduler
    if isinstance(error, ssl.SSLCertVerificationError):
        given_ca = f"cluster.security.tls_ca_file={files.get('ca_file')} ({error.verify_message})"
        return f"the certificate of the scheduler at {where} is not signed by {given_ca}: give its --tls-ca-file"
    if isinstance(error, ssl.SSLError) and "ALERT" not in reason:
        return f"the scheduler at {where} does not speak TLS: give cluster.address=tcp://{where}"
    given_cert = f"cluster.security.tls_client_cert={files.get('cert')} ({reason})"
    return (
        f"the scheduler at {where} does not accept {given_cert}: give a valid one that its CA has signed, and its key"
    )


def _is_greeted(host: str, port: int, context: ssl.SSLContext | None = None) -> OSError | None:
    """Return None if the other side speaks first, as Dask does, in TLS if there is a context; otherwise an error."""
    with socket.create_connection((host, port), timeout=PROBE_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host) if context else plain as stream:
                # With TLS 1.3, only now it is known whether the other side took our certificate.
                return None if stream.recv(1) else ConnectionError("it hangs up")
        except OSError as error:
            return error


_LOAD = """
(lambda sys, types, name, text: getattr(
    sys.modules.get(name) or (lambda module:
        exec(compile(text, name, 'exec'), vars(module)) or sys.modules.setdefault(name, module)
    )(types.ModuleType(name)),
    {function!r},
))(__import__('sys'), __import__('types'), {name!r}, {text!r})
""".strip()
"""An expression whose value is the function. It makes the module where that does not exist yet."""


def workers_of(client: Any) -> dict[str, dict[str, Any]]:
    """Return what the scheduler knows of its workers, by address; what it said last, if it can't be reached.

    `Client.scheduler_info` returns an attribute, which the client's own timer may have set meanwhile, without workers.
    """
    if client.status == "running" and client.scheduler is not None:
        with contextlib.suppress(OSError):
            return dict(client.sync(client.scheduler.identity, n_workers=-1)["workers"])
    return dict(client.scheduler_info(n_workers=-1)["workers"])


class BySource:
    """Pickles a function by its module's source, so that it can be unpickled anywhere.

    Args:
        function: of a module that imports only the standard library and Dask.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (_expression(self.function.__module__, self.function.__name__),)


@functools.cache
def _expression(module: str, function: str) -> str:
    text = inspect.getsource(sys.modules[module])
    name = f"_{module.replace('.', '_')}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return _LOAD.format(function=function, name=name, text=text)
