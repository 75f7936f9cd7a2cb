"""The fork server of the tests: what one rank had to import, the next ones have.

`fully_shard` takes half a second to import, and a model of transformers two.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import sys
from importlib.abc import MetaPathFinder
from typing import Any

from ddp_hydra.rank import fork_server
from ddp_hydra.rank.spare_forks import Caller

LEARNED = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "transformers",
    "transformers.models.llama.modeling_llama", "peft", "datasets", "torchmetrics",
)  # fmt: skip


class Learner(MetaPathFinder):
    """Finds no module, but notes for all forks which of some are imported."""

    def __init__(self) -> None:
        self.wanted = mmap.mmap(-1, len(LEARNED))
        self.done: set[str] = set()

    def find_spec(self, name: str, *_: Any) -> None:
        if name in LEARNED:
            self.wanted[LEARNED.index(name)] = 1

    def import_wanted(self) -> bool:
        new = [name for place, name in enumerate(LEARNED) if self.wanted[place] and name not in self.done]
        self.done.update(new)
        for name in new:
            with contextlib.suppress(Exception):  # a fork that needs it reports the error
                importlib.import_module(name)
        return bool(new)


class LearningServer(fork_server.ForkServer):
    """Imports what its ranks had to import, before it forks the next one."""

    def spawn(self, caller: Caller, request: dict[str, Any]) -> None:
        if learner.import_wanted():
            self.spares.end()
        super().spawn(caller, request)


if __name__ == "__main__":
    learner = Learner()
    sys.meta_path.insert(0, learner)
    fork_server.ForkServer = LearningServer
    fork_server.MODULE = "tests.support.fork_server"
    fork_server.main(int(sys.argv[1]), sys.argv[2])
