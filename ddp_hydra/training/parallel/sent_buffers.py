"""Buffers that all ranks take from rank 0, only after a step that has changed one."""

from __future__ import annotations

from torch import Tensor, nn

from ddp_hydra.rank.world import World
from ddp_hydra.training.parallel import weights


class SentBuffers:
    """Buffers of modules that all ranks take from rank 0 before a forward pass.

    The ranks vote on whether a step has changed one, so buffers that stay the same cost no exchange. All updates of a
    task share those of its loss: each of them may change it.

    Attributes:
        are_due: all ranks take them before the next forward pass. It is the same on all ranks.
        sent: the buffers as all ranks had them last, with their versions.
    """

    def __init__(self, world: World, *modules: nn.Module) -> None:
        self.world, self.modules = world, modules
        self.are_due = True
        self.sent: list[tuple[Tensor, int]] = []

    def send(self) -> None:
        # A collective.
        if self.are_due:
            weights.broadcast_buffers(self.world, *self.modules)
            self.sent = self._versions()

    def have_changed(self) -> bool:
        # On this rank, since all had rank 0's. Torch does not count what is written into `buffer.data`.
        now = self._versions()
        return len(now) != len(self.sent) or any(
            one is not other or version != before
            for (one, version), (other, before) in zip(now, self.sent, strict=True)
        )

    def _versions(self) -> list[tuple[Tensor, int]]:
        return [(buffer, buffer._version) for module in self.modules for buffer in module.buffers()]
