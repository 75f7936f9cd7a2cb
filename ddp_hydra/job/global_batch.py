"""Keeps the global batch when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankBatch:
    """Counts the samples that one rank takes in a step.

    Args:
        size: samples of a micro-batch, data.batch_size.
        micro_batches: micro-batches of a step, trainer.gradient_accumulation_steps.
    """

    size: int
    micro_batches: int

    def global_size(self, ranks: int) -> int:
        return self.size * self.micro_batches * ranks


def redistribute(batch: RankBatch, old_ranks: int, new_ranks: int) -> RankBatch:
    """Divide a global batch among another number of ranks; the same as before if it is not divisible among them.

    Memory may be full already, so more micro-batches are preferred to larger ones. Micro-batches of less than half the
    size would be slow, so one larger micro-batch is preferred to those.
    """
    per_rank, rest = divmod(batch.global_size(old_ranks), new_ranks)
    if rest:
        return batch
    least = -(-per_rank // batch.size)
    count = next((count for count in range(least, 2 * least + 1) if per_rank % count == 0), 0)
    return RankBatch(per_rank // count, count) if count else RankBatch(per_rank, 1)


def changed_settings(batch: RankBatch, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the settings of a rank's batch, by their keys.

    DDP's static graph does not go with several micro-batches: then the parameters are looked for in each step.
    """
    settings = {"data.batch_size": batch.size, "trainer.gradient_accumulation_steps": batch.micro_batches}
    if batch.micro_batches > 1 and config["parallel"].get("static_graph"):
        settings |= {"parallel.static_graph": False, "parallel.find_unused_parameters": True}
    return settings


def describe_change(old: RankBatch, old_ranks: int, new: RankBatch, new_ranks: int) -> str:
    ranks, total = f"{new_ranks} ranks instead of {old_ranks}: ", old.global_size(old_ranks)
    if new.global_size(new_ranks) != total:
        accumulation = f" trainer.gradient_accumulation_steps={new.micro_batches}" if new.micro_batches > 1 else ""
        return (
            f"{ranks}a global batch of {total} does not divide among them, so it is {new.global_size(new_ranks)} now: "
            f"data.batch_size={new.size}{accumulation} as before. The samples go on in their order, and the learning "
            "rate along its curve"
        )
    changes = []
    if new.micro_batches != old.micro_batches:
        changes.append(f"trainer.gradient_accumulation_steps is {new.micro_batches} instead of {old.micro_batches}")
    if new.size != old.size:
        changes.append(f"data.batch_size is {new.size} instead of {old.size}")
    memory = ", which takes more memory" if new.size > old.size else ""
    return f"{ranks}{' and '.join(changes)}{memory}, so the global batch stays {total}"
