"""The jobs of a sweep that run from rung to rung: which pauses, which goes on, and what a killed sweep finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import Need, PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import Objective, Row, State
from ddp_hydra.sweep.stopping.pausing import Pausing
from ddp_hydra.sweep.stopping.rungs import Rungs

LOSS = Objective("val/loss", maximize=False)
TRAINER = {"epochs": 9, "max_steps": None, "pause_after_validations": None}
OURS = {"cluster": {"_target_": "distributed.LocalCluster"}, "dispatch": {"ranks": 1}, "trainer": TRAINER}


class Sweep:
    """The parts of a sweep that rungs need. Jobs report their lr as the loss, less a hundredth for each epoch."""

    def __init__(self, folder: Path, earlier: list[Row] | None = None) -> None:
        self.folder, config = folder, OmegaConf.create(OURS)
        self.queue = JobQueue(folder, None, config, Need(), earlier, False)  # type: ignore[arg-type]
        self.stopping = Pausing(Rungs(maximize=False), self.queue, LOSS, config)

    def add(self, *lrs: float) -> list[PlannedJob]:
        jobs = [self.queue.add([f"optimizer.lr={lr}"], number) for number, lr in enumerate(lrs)]
        self.stopping.add(jobs)
        return jobs

    def run_next(self, *, fails: bool = False) -> tuple[int, int]:
        """Run the first job of the queue to its goal; return its number and the goal."""
        job = self.queue.jobs.popleft()
        job.config, job.is_ours, job.folder = OmegaConf.create(OURS), True, self.folder / job.row.folder
        self.stopping.before_start(job)
        goal = job.config.trainer.pause_after_validations
        if not fails:
            report(job.folder, float(job.row.overrides[0].partition("=")[2]), min(goal, 9))
        job.row.state = State.failed if fails else State.done if goal >= 9 else State.paused
        self.stopping.on_end(job)
        return job.row.number, goal


def report(folder: Path, lr: float, epochs: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [{"step": 5 * n, "epoch": float(n), "val/loss": lr - n / 100} for n in range(1, epochs + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def row(number: int, lr: float, state: State, epochs: int) -> Row:
    return Row(number, [f"optimizer.lr={lr}"], str(number), state, lr, step=5 * epochs, value=lr)


def test_the_best_third_goes_on_and_the_others_are_stopped_at_the_end(tmp_path, caplog):
    caplog.set_level("INFO")
    sweep = Sweep(tmp_path)
    jobs = sweep.add(0.3, 0.1, 0.2)
    assert [sweep.run_next() for _ in jobs] == [(0, 1), (1, 1), (2, 1)]
    assert [job.row.number for job in sweep.queue.jobs] == [1]
    assert "job 1 goes on to report 3, rung 1: val/loss 0.09 is in place 1 of 3, and the best 1 go on" in caplog.text
    assert sweep.run_next() == (1, 3)
    assert not sweep.queue
    assert sweep.stopping.end_batch()  # so that one is trained
    assert "val/loss 0.07 is in place 1 of 1, and no job has come to its end" in caplog.text
    assert sweep.run_next() == (1, 9)
    assert not sweep.stopping.end_batch()
    assert [job.row.state for job in jobs] == [State.stopped, State.done, State.stopped]
    assert (jobs[0].row.message, jobs[0].row.objective) == ("stopped at 1 of 9 epochs, rung 0", 0.29)
    assert (
        "job 0 stopped at 1 of 9 epochs, rung 0: val/loss 0.29 is in place 3 of 3, and the best 1 go on" in caplog.text
    )


def test_one_that_goes_on_starts_before_those_that_have_not_begun(tmp_path):
    sweep = Sweep(tmp_path)
    sweep.add(0.3, 0.1, 0.2, 0.4, 0.5)
    assert [sweep.run_next() for _ in range(5)] == [(0, 1), (1, 1), (2, 1), (1, 3), (3, 1)]


def test_a_job_that_fails_holds_up_nobody(tmp_path):
    sweep = Sweep(tmp_path)
    jobs = sweep.add(0.3, 0.1, 0.2)
    sweep.run_next()
    assert sweep.run_next(fails=True) == (1, 1)
    jobs[2].fail(ValueError("no such key"))
    sweep.stopping.poll()
    assert [job.row.number for job in sweep.queue.jobs] == [0]
    assert sweep.run_next() == (0, 3)


def test_a_killed_sweep_goes_on_where_each_job_stands(tmp_path):
    for number, lr, epochs in ((0, 0.3, 1), (1, 0.1, 3), (2, 0.2, 1)):
        report(tmp_path / str(number), lr, epochs)
    earlier = [row(0, 0.3, State.paused, 1), row(1, 0.1, State.paused, 3), row(2, 0.2, State.paused, 1)]
    sweep = Sweep(tmp_path, earlier)
    jobs = sweep.add(0.3, 0.1, 0.2, 0.05)
    assert [job.row.state for job in jobs[:3]] == [State.paused] * 3
    assert [job.row.number for job in sweep.queue.jobs] == [3]
    assert jobs[1].row is earlier[1]
    assert sweep.run_next() == (3, 1)
    assert sweep.stopping.end_batch()
    assert sweep.run_next() == (1, 9)


def test_a_job_that_was_promoted_when_the_sweep_was_killed_is_promoted_again(tmp_path):
    for number, lr in enumerate((0.3, 0.1, 0.2)):
        report(tmp_path / str(number), lr, 1)
    sweep = Sweep(tmp_path, [row(number, lr, State.paused, 1) for number, lr in enumerate((0.3, 0.1, 0.2))])
    sweep.add(0.3, 0.1, 0.2)
    assert sweep.run_next() == (1, 3)


def test_jobs_that_pause_by_themselves_are_refused(tmp_path):
    sweep = Sweep(tmp_path)
    job = sweep.queue.add(["trainer.pause_after_validations=2"], 0)
    with pytest.raises(ConfigError, match="asha and hyperband pause jobs themselves"):
        sweep.stopping.add([job])
    config = OmegaConf.create({**OURS, "trainer": {**TRAINER, "pause_after_validations": 2}})
    with pytest.raises(ConfigError, match="asha and hyperband pause jobs themselves"):
        Pausing(Rungs(maximize=False), sweep.queue, LOSS, config)
