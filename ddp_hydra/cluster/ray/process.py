"""The Ray actor that runs a Dask scheduler or worker. It is imported on the nodes of Ray."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ddp_hydra.rank.processes import die_with_parent

POLL_S = 0.02


class DaskProcess:
    """Runs `dask scheduler` or `dask worker` as a child of an actor; each ends with the other.

    If the child is killed or fails, the actor fails, and Ray starts it again, on another node if need be. If the child
    ends by itself, as it does when the scheduler closes the cluster, the actor ends for good.

    Args:
        command: the words after `dask`.
        config: of Dask, serialized.
        group: the placement group that is given back when the child ends; "" for none.
    """

    def __init__(self, command: list[str], config: str, group: str = "") -> None:
        self.group, self.found = group, ""
        words = [*command, "--host", own_address()]
        if command[0] == "scheduler":
            self.folder = Path(mkdtemp(prefix="ddp_hydra-ray-"))
            words += ["--scheduler-file", str(self.folder / "address")]
        parent = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dask", *words],
            env={**os.environ, "DASK_INTERNAL_INHERIT_CONFIG": config},
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        threading.Thread(target=self._end_with_child, daemon=True).start()

    def address(self, timeout_s: float) -> str:
        """Return the address of the scheduler.

        Raises:
            RuntimeError: it has ended, or takes longer than the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while not self.found:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`dask scheduler` gave no address (exit code {self.process.poll()})")
            with contextlib.suppress(OSError, ValueError):  # not there, or not whole
                self.found = str(json.loads((self.folder / "address").read_text())["address"])
                shutil.rmtree(self.folder)  # at once, because Ray kills actors
            time.sleep(POLL_S)
        return self.found

    def stop(self) -> None:
        """End the child, and with it the actor."""
        self.process.terminate()

    def _end_with_child(self) -> None:
        import ray

        code = self.process.wait()
        if self.group:
            with contextlib.suppress(Exception):  # it is gone already
                ray.util.remove_placement_group(ray.util.get_placement_group(self.group))
        if code == 0:
            with contextlib.suppress(Exception):
                itself: Any = ray.get_runtime_context().current_actor
                ray.kill(itself, no_restart=True)
                time.sleep(5)
        os._exit(1)


def own_address() -> str:
    """Return the address under which the other nodes of Ray reach this one."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
