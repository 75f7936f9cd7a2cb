"""A cluster class as a site may have its own: named, resized, kept, and unknown to ddp_hydra."""

from __future__ import annotations

from typing import Any, Self

from distributed import LocalCluster


class Pool:
    """Workers on this machine."""

    made: Pool | None = None

    def __init__(self, size: int = 1, shutdown_on_close: bool = False) -> None:
        self.shutdown_on_close, self.name = shutdown_on_close, "my pool"
        self.is_up = True
        self.cluster = LocalCluster(
            n_workers=0, threads_per_worker=size, memory_limit=0, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        )
        type(self).made = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shutdown_on_close:
            self.close()

    def close(self) -> None:
        self.cluster.close()
        self.is_up = False

    def scale(self, n: int) -> None:
        self.cluster.scale(n)

    def get_client(self) -> Any:
        return self.cluster.get_client()
