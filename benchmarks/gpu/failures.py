"""Ranks that are killed, stopped or hang in the middle of their exchanges, and a preemption: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import report
from benchmarks.gpu.bench import SHORT, Bench, Job, differing
from benchmarks.report import Figure, Goal

NONE = Goal(0, at_most=True)
STEPS = 30
SETTINGS = (
    f"trainer.max_steps={STEPS}", "trainer.epochs=null", "trainer.checkpoint_every_steps=5", "data.val=null",
    "optimizer=adamw", "model.dropout=0.1",
)  # fmt: skip
HANG_S = 5
INTERRUPTED = 130


def faults(bench: Bench) -> Iterator[Figure]:
    """Strike rank 1 in step 18: the run goes on from its last checkpoint, and ends with the same bits."""
    settings = (*SHORT, *SETTINGS, *bench.ranks(2), f"dispatch.hang_timeout_s={HANG_S}")
    whole = bench.job("whole", *settings)
    for kind, what in (("kill", "killed"), ("stop", "stopped by SIGSTOP"), ("hang", "that hangs")):
        struck = bench.job(kind, *settings, f"+fault={kind},rank=1,step=18")
        name = f"a rank {what}, by {bench.backend}"
        yield report.value(f"{name}: restarts", struck.summary["restarts"], Goal(1))
        yield report.value(f"{name}: steps done again", struck.summary["steps_lost"], Goal(5, at_most=True), "steps")
        yield report.value(f"{name}: parts of the last checkpoint that differ", compared(whole, struck), NONE)


def nccl(bench: Bench) -> Iterator[Figure]:
    """Look whether the ranks of the faults were on GPUs of their own, and met through NCCL."""
    job = bench.job("nccl", *SHORT, *SETTINGS, *bench.ranks(2))
    logs = [path.read_text(errors="replace") for path in sorted((job.dir / "logs").glob("rank-*.log"))]
    yield report.value("ranks that name their GPU, by NCCL", sum(bench.card.name in log for log in logs), Goal(2))


def interrupt(bench: Bench) -> Iterator[Figure]:
    """Send SIGTERM to a worker in step 12, and go on. Steps take 50 ms, so that there is a middle."""
    folder = bench.new_folder("steps")
    folder.mkdir()
    slow = ("optimizer=traced_sgd", "optimizer.step_s=0.05", f"optimizer.folder={folder}", "trainer.max_steps=60")
    settings = (*SHORT, *SETTINGS[1:4], "model.dropout=0.1", *slow, *bench.ranks(2))
    whole = bench.job("whole", *settings)
    stopped = bench.job("stopped", *settings, "+fault=term,step=12", ends=INTERRUPTED)
    resumed = bench.job("resumed", *settings, f"resume={stopped.dir}")
    name = f"a preemption and resume, by {bench.backend}"
    yield report.value(f"{name}: parts of the last checkpoint that differ", compared(whole, resumed), NONE)
    yield report.value(f"{name}: steps done again", stopped.summary["steps_lost"], NONE, "steps")


def compared(one: Job, other: Job) -> int:
    """Return how many parts of the last checkpoints of two jobs differ."""
    return len(differing(one.checkpoint(), other.checkpoint()))
