"""Divides the global batch among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.console.text import counted
from ddp_hydra.errors import ConfigError


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


def asked(cfg: DictConfig, ranks: int) -> RankBatch:
    """Return the batch of each rank that a config asks for: data.global_batch wins over data.batch_size."""
    micro_batches, total = cfg.trainer.gradient_accumulation_steps, cfg.data.get("global_batch")
    if total is None:
        return RankBatch(cfg.data.batch_size, micro_batches)
    size, rest = divmod(total, ranks * micro_batches)
    if rest or not size:
        parts = counted(ranks, "rank") + (f" x {micro_batches} micro-batches" if micro_batches > 1 else "")
        raise ConfigError(
            f"data.global_batch={total} does not divide among {parts}: give a multiple of {ranks * micro_batches}, as "
            f"{max(1, round(total / (ranks * micro_batches))) * ranks * micro_batches}"
        )
    return RankBatch(size, micro_batches)


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


def settle(cfg: DictConfig, before: Mapping[str, Any], ranks: int, first_ranks: int) -> tuple[dict[str, int], str]:
    """Write the batch of each rank into a config.

    Args:
        before: content of the checkpoint that the run goes on from; {} for none. Its global batch stays, unless the
            config asks for another batch than the checkpoint's.
        first_ranks: number of ranks of the job's first attempt.

    Returns:
        The batch that the run has begun with, for its checkpoints; and what has changed since then, or "".
    """
    first, then = wanted = asked(cfg, first_ranks), first_ranks
    if saved := before.get("batch"):
        old = RankBatch(saved["size"], saved["micro_batches"])
        is_same_key = "config" not in before or _by_total(cfg) == _by_total(OmegaConf.create(dict(before["config"])))
        if is_same_key and _asks_for(cfg, old, saved["ranks"]):
            first, then = old, saved["ranks"]
    new = first if ranks == then else redistribute(first, then, ranks)
    cfg.data.batch_size, cfg.trainer.gradient_accumulation_steps = new.size, new.micro_batches
    # DDP's static graph does not go with several micro-batches: then the parameters are looked for in each step.
    if new != wanted[0] and new.micro_batches > 1 and cfg.parallel.get("static_graph"):
        cfg.parallel.static_graph, cfg.parallel.find_unused_parameters = False, True
    return {**asdict(first), "ranks": then}, "" if ranks == then else describe_change(first, then, new, ranks)


def _asks_for(cfg: DictConfig, batch: RankBatch, ranks: int) -> bool:
    # By the values: the variable of an interpolation may have another one since.
    total, micro_batches = cfg.data.get("global_batch"), cfg.trainer.gradient_accumulation_steps
    is_size = cfg.data.batch_size == batch.size if total is None else total == batch.global_size(ranks)
    return is_size and bool(micro_batches == batch.micro_batches)


def _by_total(cfg: DictConfig) -> bool:
    # Whether data.global_batch rules, and not data.batch_size.
    try:
        return cfg.data.get("global_batch") is not None
    except OmegaConfBaseException:  # of a variable that another host has
        return True


def size_of(batch: Mapping[str, int], ranks: int) -> int:
    """Return the samples that each rank takes at once: `batch` is the one that the run has begun with."""
    return redistribute(RankBatch(batch["size"], batch["micro_batches"]), batch["ranks"], ranks).size


def describe_change(old: RankBatch, old_ranks: int, new: RankBatch, new_ranks: int) -> str:
    total, now = old.global_size(old_ranks), new.global_size(new_ranks)
    fate = f"the global batch stays {total}"
    if now != total:
        fate = f"a global batch of {total} does not divide among them, so it is {now} now"
    settings = f"data.batch_size={new.size} trainer.gradient_accumulation_steps={new.micro_batches}"
    return f"{counted(new_ranks, 'rank')} instead of {old_ranks}: {fate}, with {settings}"
