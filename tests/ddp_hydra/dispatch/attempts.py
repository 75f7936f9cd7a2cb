"""An attempt whose ranks and workers only say what the tests want."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from msgspec import structs

from ddp_hydra.console.signals import Interrupts
from ddp_hydra.dispatch.attempt import Attempt
from ddp_hydra.errors import Failure
from ddp_hydra.rank import inbox, spec
from ddp_hydra.rank.spec import GangSettings, JobSpec
from ddp_hydra.record import End, File, Record

DONE = spec.encode("done")
OK = File("value", len(DONE), hashlib.sha256(DONE).hexdigest(), inline=base64.b64encode(DONE).decode())


def end(rank: int, kind: str = "ok", message: str = "", time_s: float = 0.0, step: int = 0) -> Record:
    if kind == "ok":
        return Record(End(OK, step=step), rank)
    if kind == "stopped":
        return Record(End(stopped=True, step=step), rank)
    return Record(End(failure=Failure(kind, message=message, time_s=time_s), step=step), rank)


class Client:
    """As much of Dask's as an attempt touches; what the workers are told is in `sent`."""

    status = "running"

    def __init__(self, ranks: int) -> None:
        self.workers = [f"tcp://h:{n}" for n in range(ranks)]
        self.sent: list[tuple[str, int, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.topics: dict[str, Callable[[Any], None]] = {}
        self.on_sent: Callable[[int, dict[str, Any]], None] = lambda rank, message: None
        known = {worker: {"local_directory": ""} for worker in self.workers}
        self.scheduler = SimpleNamespace(identity=lambda n_workers: {"workers": known if n_workers else {}})
        self.script: list[Record | dict[str, Any]] = []

    def scheduler_info(self, n_workers: int = 5) -> dict[str, Any]:
        return {"address": "tcp://s:1", "workers": {}}  # a timer has asked meanwhile

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        self.topics[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        del self.topics[topic]

    def submit(self, function: Any, order: Any, key: str, **_: Any) -> Any:
        if key.endswith(f"-{len(self.workers) - 1}"):
            for event in self.script:
                self.publish(event)
        return SimpleNamespace(key=key, status="pending")

    def publish(self, event: Record | dict[str, Any] | bytes) -> None:
        for handler in self.topics.values():
            handler((0.0, event.encode() if isinstance(event, Record) else event))

    def cancel(self, futures: list[Any], force: bool) -> None:
        self.cancelled += [future.key for future in futures]

    def sync(self, function: Any, *args: Any, callback_timeout: float | None = None, **kwargs: Any) -> Any:
        assert callback_timeout is not None or kwargs == {"n_workers": -1}
        return function(*args, **kwargs)

    def _run(self, function: Any, *args: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        assert on_error == "ignore"
        if function is not inbox.deliver:
            return {}
        gang, _, rank, message = args
        for worker in workers:
            to = self.workers.index(worker) if rank is None else rank
            self.sent.append((gang, to, dict(message)))
            self.on_sent(to, dict(message))
        return dict.fromkeys(workers, True)

    def sent_to(self, what: str) -> list[int]:
        return [rank for _, rank, message in self.sent if what in message]


SETTINGS = GangSettings(hang_timeout_s=60.0, first_step_timeout_s=60.0, start_timeout_s=60.0, retry_s=0.0)


class Gang:
    """What an attempt calls of its gang."""

    def __init__(self, client: Client) -> None:
        self.client, self.records, self.gave_up = client, [], 0

    def read(self, attempt: Attempt, record: Record) -> None:
        self.records.append(record)

    def on_give_up(self) -> None:
        self.gave_up += 1


def attempt_of(gang: Gang, number: int, specs: list[Any]) -> Attempt:
    job = JobSpec(gang="topic", attempt=number, ranks=tuple(specs), settings=SETTINGS)
    read = lambda attempt, record: gang.read(attempt, record)  # noqa: E731, for tests that change it
    one = Attempt(gang.client, job, Interrupts(), read, threading.Event(), gang.on_give_up, {})
    one.gang = gang
    return one


def change(one: Attempt, **settings: Any) -> None:
    one.settings = structs.replace(one.settings, **settings)
