"""The jobs of a sweep that a rule stops: what happens to them, and what a sweep knows of them that goes on."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.sweep.planned_job import Need, PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import Objective, Row, State
from ddp_hydra.sweep.scheduler import RunningJob
from ddp_hydra.sweep.stopping.decisions import Rule
from ddp_hydra.sweep.stopping.interrupting import WAITS, Interrupting
from ddp_hydra.sweep.stopping.rules import Median, Threshold
from ddp_hydra.writers.run_dir import read_summary

LOSS = Objective("val/loss", maximize=False)
OURS = {
    "cluster": {"_target_": "distributed.LocalCluster"},
    "dispatch": {},
    "trainer": {"epochs": 4, "max_steps": None},
}


class Signals:
    """Stands for a job's process, and notes the signals that it gets."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def signal(self, number: int) -> None:
        self.sent.append(number)


class Sweep:
    """The parts of a sweep that a rule needs: a folder, a queue, and jobs that run."""

    def __init__(self, folder: Path, rule: Rule, earlier: list[Row] | None = None, ours: bool = True) -> None:
        config = OmegaConf.create(OURS if ours else {"lr": 1})
        self.folder, self.running = folder, []
        self.queue = JobQueue(folder, None, config, Need(), earlier, False)  # type: ignore[arg-type]
        self.stopping = Interrupting(rule, self.queue, self.running, LOSS, config)
        self.ours = ours

    def add(self, count: int) -> list[PlannedJob]:
        jobs = [self.queue.add([f"lr={number}"], number) for number in range(count)]
        self.stopping.add(jobs)
        return jobs

    def start(self, job: PlannedJob) -> Signals:
        process: Any = Signals()
        self.queue.remove(job)
        job.row.state, job.folder, job.is_ours = State.running, self.folder / job.row.folder, self.ours
        job.folder.mkdir(exist_ok=True)
        self.running.append(RunningJob(job, process))
        self.stopping.before_start(job)
        return process

    def end(self, job: PlannedJob, state: State) -> None:
        self.running[:] = [running for running in self.running if running.planned is not job]
        job.row.state = state
        self.stopping.on_end(job)


def report(folder: Path, *losses: float, steps: bool = True) -> None:
    """Let a job report losses, one after each epoch of 5 steps."""
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for number, loss in enumerate(losses, 1):
            place = {"step": 5 * number, "epoch": float(number)} if steps else {"step": None}
            file.write(json.dumps({**place, "val/loss": loss, "train/loss": loss / 2}) + "\n")


def states(jobs: list[PlannedJob]) -> list[State]:
    return [job.row.state for job in jobs]


def test_a_job_is_interrupted_and_counts_up_to_the_report_that_it_was_stopped_at(tmp_path):
    sweep = Sweep(tmp_path, Threshold(False, bound=0.5, after=2))
    good, bad = sweep.add(2)
    processes = sweep.start(good), sweep.start(bad)
    (bad.folder / "summary.json").write_text('{"status": "interrupted"}')
    report(good.folder, 0.9, 0.1)
    report(bad.folder, 0.9, 0.8)
    sweep.stopping.poll()
    assert [process.sent for process in processes] == [[], [signal.SIGINT]]
    assert sweep.running[1].kill_at is None  # it saves a checkpoint first
    (bad.folder / "metrics.jsonl").unlink()
    report(bad.folder, 0.9, 0.8, 0.7)
    sweep.end(bad, State.interrupted)
    row = bad.row
    assert (row.state, row.objective, row.step, row.epoch, row.metrics["train/loss"]) == (
        State.stopped,
        0.8,
        10,
        2,
        0.4,
    )
    assert row.message == "stopped at 2 of 4 epochs: its best value 0.8 is not better than 0.5"
    assert bad.result.return_value == 0.8
    summary = read_summary(bad.folder)
    assert (summary.status, summary.stopped) == ("stopped", row.message)
    sweep.end(good, State.done)
    assert (good.row.state, good.row.message) == (State.done, "")


def test_a_job_that_has_ended_waits_for_those_before_it(tmp_path):
    sweep = Sweep(tmp_path, Median(False, trials=1))
    slow, quick = sweep.add(2)
    sweep.start(slow), sweep.start(quick)
    report(quick.folder, 0.9, 0.8, 0.7)
    sweep.end(quick, State.done)
    assert (quick.row.state, quick.row.message) == (State.paused, WAITS)
    report(slow.folder, 1.0)
    sweep.stopping.poll()
    assert quick.row.state == State.paused
    report(slow.folder, 1.0, 0.9)  # the first is known
    sweep.stopping.poll()
    assert (quick.row.state, quick.row.message) == (State.paused, WAITS)
    sweep.end(slow, State.failed)
    assert states([slow, quick]) == [State.failed, State.done]
    assert quick.row.message == ""


def test_a_job_that_has_ended_may_be_stopped_at_an_earlier_report(tmp_path):
    sweep = Sweep(tmp_path, Median(False, trials=1))
    slow, quick = sweep.add(2)
    sweep.start(slow), sweep.start(quick)
    report(quick.folder, 0.9, 0.1)
    sweep.end(quick, State.done)
    report(slow.folder, 0.2)
    sweep.stopping.poll()
    assert (quick.row.state, quick.row.objective, quick.row.epoch) == (State.stopped, 0.9, 1)


def test_a_last_report_of_the_whole_run_stops_nobody(tmp_path):
    sweep = Sweep(tmp_path, Threshold(False, bound=0.5, after=4))
    (job,) = sweep.add(1)
    process = sweep.start(job)
    report(job.folder, 0.9, 0.9, 0.9, 0.9)
    sweep.stopping.poll()
    assert process.sent == []
    sweep.end(job, State.done)
    assert job.row.state == State.done


def test_a_job_that_fails_before_it_starts_keeps_nobody_waiting(tmp_path):
    sweep = Sweep(tmp_path, Median(False, trials=1))
    failing, other = sweep.add(2)
    sweep.start(other)
    report(other.folder, 0.9)
    sweep.end(other, State.done)
    assert other.row.state == State.paused
    sweep.queue.remove(failing)
    failing.fail(ValueError("no such key"))
    sweep.stopping.poll()
    assert states([failing, other]) == [State.failed, State.done]


def test_the_task_of_another_app_is_killed_if_it_does_not_heed_the_signal(tmp_path):
    sweep = Sweep(tmp_path, Threshold(False, bound=0.5), ours=False)
    (job,) = sweep.add(1)
    process = sweep.start(job)
    report(job.folder, math.nan, steps=False)
    sweep.stopping.poll()
    assert process.sent == [signal.SIGINT]
    assert sweep.running[0].kill_at is not None
    sweep.end(job, State.failed)
    assert (job.row.state, job.row.message) == (State.stopped, "stopped at report 1: its objective is NaN")
    assert math.isnan(job.result.return_value)


class TestKilled:
    """A sweep that was killed goes on in its folder."""

    def test_a_job_that_was_stopped_stays_so_and_others_are_judged_by_it(self, tmp_path):
        report(tmp_path / "0", 0.5, 0.4, 0.3, 0.2)
        report(tmp_path / "1", 0.9, 0.8)
        earlier = [
            Row(0, ["lr=0"], "0", State.done, 0.2, value=0.2),
            Row(1, ["lr=1"], "1", State.stopped, 0.9, step=5, value=0.9, message="stopped"),
        ]
        sweep = Sweep(tmp_path, Median(False, trials=2), earlier)
        done, stopped, new = sweep.add(3)
        assert (states([done, stopped]), stopped.row.message) == ([State.done, State.stopped], "stopped")
        assert [job.row.number for job in sweep.queue.jobs] == [2]
        process = sweep.start(new)
        report(new.folder, 0.8)  # worse than 0.7, the median of 0.5 and 0.9
        sweep.stopping.poll()
        assert process.sent == [signal.SIGINT]

    def test_a_job_that_had_ended_is_not_run_again(self, tmp_path):
        report(tmp_path / "1", 0.9, 0.8, 0.7)
        earlier = [
            Row(0, ["lr=0"], "0", State.interrupted, None),
            Row(1, ["lr=1"], "1", State.paused, 0.7, step=15, value=0.7, message=WAITS),
        ]
        (tmp_path / "1" / "summary.json").write_text('{"status": "done"}')
        sweep = Sweep(tmp_path, Median(False, trials=1), earlier)
        first, ended = sweep.add(2)
        assert [job.row.number for job in sweep.queue.jobs] == [0]
        assert (ended.row.state, ended.result.return_value, ended.is_ours) == (State.paused, 0.7, True)
        sweep.start(first)
        report(first.folder, 1.0, 0.9, 0.8, 0.7)
        sweep.end(first, State.done)
        assert states([first, ended]) == [State.done, State.done]

    @pytest.mark.parametrize(("step", "is_stopped"), [(10, True), (5, False), (None, False)])
    def test_what_was_reported_before_the_last_checkpoint_counts(self, step, is_stopped, tmp_path, monkeypatch):
        """A job that would be stopped at such a report is not started."""
        monkeypatch.setattr("ddp_hydra.sweep.stopping.reports.saved_step", lambda run_dir: step)
        report(tmp_path / "0", 0.9, 0.8)
        earlier = [Row(0, ["lr=0"], "0", State.interrupted, 0.8, step=10)]
        sweep = Sweep(tmp_path, Threshold(False, bound=0.5, after=2), earlier)
        (job,) = sweep.add(1)
        assert bool(sweep.queue) != is_stopped
        assert (job.row.state == State.stopped) == is_stopped
