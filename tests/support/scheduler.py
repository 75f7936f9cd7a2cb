"""A stand-in for Dask's scheduler, to which the plugin that reserves workers is added."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from distributed.core import Status

from ddp_hydra.cluster import scheduler_plugin
from ddp_hydra.cluster.scheduler_plugin import ReservationPlugin, reserve


class Scheduler:
    """As much of Dask's scheduler as a reservation touches."""

    def __init__(self, *workers: str, clients: tuple[str, ...] = ("me", "you")) -> None:
        self.workers: dict[str, Any] = {}
        self.clients = {client: SimpleNamespace(last_seen=scheduler_plugin.scheduler_time()) for client in clients}
        self.aborted: list[str] = []
        self.address = "tcp://s:8786"
        self.client_comms = {
            client: SimpleNamespace(abort=lambda client=client: self.aborted.append(client)) for client in clients
        }
        self.plugins: dict[str, ReservationPlugin] = {}
        self.handlers: dict[str, Any] = {}
        self.adaptive_target: Callable[..., int] = lambda target_duration=None: 0
        self.retire_workers: Any = None
        self.subscribe_topic = lambda topic, client: None
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.loop = SimpleNamespace(call_later=lambda s, act, *args: self.later.append((s, lambda: act(*args))))
        self._broker = SimpleNamespace(_topics={}, truncate=lambda topic: self._broker._topics[topic].clear())
        for worker in workers:
            self.add(worker)

    def identity(self, n_workers: int) -> dict[str, Any]:
        return {"address": self.address, "workers": dict(self.workers) if n_workers == -1 else {}}

    def add(self, worker: str, status: Status = Status.running) -> None:
        self.workers[worker] = SimpleNamespace(host=worker.partition(":")[0], status=status)
        for plugin in list(self.plugins.values()):
            plugin.add_worker(self, worker)

    def remove(self, worker: str, reason: str = "handle-worker-cleanup-1") -> None:
        del self.workers[worker]
        for plugin in list(self.plugins.values()):
            plugin.remove_worker(self, worker, stimulus_id=reason)

    def remove_client(self, client: str) -> None:
        for plugin in list(self.plugins.values()):
            plugin.remove_client(self, client)
        del self.clients[client]

    def add_plugin(self, plugin: ReservationPlugin, name: str) -> None:
        assert name not in self.plugins
        self.plugins[name] = plugin

    def log_event(self, topic: str, message: Any) -> None:
        self._broker._topics.setdefault(topic, []).append(message)
        for plugin in self.plugins.values():
            plugin.log_event(topic, message)

    @property
    def topics(self) -> dict[str, list[Any]]:
        return self._broker._topics

    @property
    def reserved(self) -> dict[str, list[str]]:
        return {gang: entry["workers"] for gang, entry in scheduler_plugin._reservations(self).items()}

    def reserve(
        self,
        gang: str,
        wanted: int | None,
        least: int | None = None,
        holder: str = "me",
        avoid=(),
        sweep: str = "",
        expected: int = 0,
    ) -> Any:
        topic = f"topic of {gang}"
        place = gang, holder, sweep or gang, topic
        answer = reserve(*place, wanted, least or wanted, avoid, expected, dask_scheduler=self)
        answer.pop("ahead", None)
        answer.pop("grows", None)
        return answer
