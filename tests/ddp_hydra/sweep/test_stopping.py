"""What the jobs of a sweep report, and what becomes of the jobs that are stopped, pause or go on."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.planned_job import Need, PlannedJob
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.scheduler import RunningJob
from ddp_hydra.sweep.stop_rules import Median, ReportPolicy, Rule, Rungs, Threshold
from ddp_hydra.sweep.stopping import WAITS, JobStopper, ReportFile
from ddp_hydra.writers.run_dir import read_summary

LOSS = SweepObjective("val/loss", maximize=False)
OURS = {
    "cluster": {"_target_": "distributed.LocalCluster"},
    "dispatch": {},
    "trainer": {"epochs": 4, "max_steps": None, "pause_after_validations": None},
}


class Signals:
    """Stands for a job's process, and notes the signals that it gets."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def signal(self, number: int) -> None:
        self.sent.append(number)


class Sweep:
    """The parts of a sweep that a rule needs: a folder, a queue, and jobs that run."""

    def __init__(self, folder: Path, rule: Rule, earlier: list[JobRow] | None = None, ours: bool = True) -> None:
        config = OmegaConf.create(OURS if ours else {"lr": 1})
        self.folder, self.running = folder, []
        self.queue = JobQueue(folder, None, config, Need(), earlier, False)  # type: ignore[arg-type]
        self.stopping = JobStopper(lambda: ReportPolicy(rule), self.queue, self.running, LOSS)
        self.ours = ours

    def add(self, count: int) -> list[PlannedJob]:
        jobs = [self.queue.add([f"lr={number}"], number) for number in range(count)]
        self.stopping.add(jobs)
        return jobs

    def start(self, job: PlannedJob) -> Signals:
        process: Any = Signals()
        self.queue.remove(job)
        job.row.state, job.folder, job.is_ours = JobState.running, self.folder / job.row.folder, self.ours
        job.folder.mkdir(exist_ok=True)
        self.running.append(RunningJob(job, process))
        self.stopping.before_start(job)
        return process

    def end(self, job: PlannedJob, state: JobState) -> None:
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


def states(jobs: list[PlannedJob]) -> list[JobState]:
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
    sweep.end(bad, JobState.interrupted)
    row = bad.row
    assert (row.state, row.objective, row.step, row.epoch, row.metrics["train/loss"]) == (
        JobState.stopped,
        0.8,
        10,
        2,
        0.4,
    )
    assert row.message == "stopped at 2 of 4 epochs: its best value 0.8 is not better than 0.5"
    assert bad.result.return_value == row.best == 0.8
    summary = read_summary(bad.folder)
    assert (summary.status, summary.stopped) == ("stopped", row.message)
    sweep.end(good, JobState.done)
    assert (good.row.state, good.row.message) == (JobState.done, "")


def test_a_job_that_has_ended_waits_for_those_before_it(tmp_path):
    sweep = Sweep(tmp_path, Median(False, trials=1))
    slow, quick = sweep.add(2)
    sweep.start(slow), sweep.start(quick)
    report(quick.folder, 0.9, 0.8, 0.7)
    sweep.end(quick, JobState.done)
    assert (quick.row.state, quick.row.message) == (JobState.paused, WAITS)
    report(slow.folder, 1.0)
    sweep.stopping.poll()
    assert quick.row.state == JobState.paused
    report(slow.folder, 1.0, 0.9)  # the first is known
    sweep.stopping.poll()
    assert (quick.row.state, quick.row.message) == (JobState.paused, WAITS)
    sweep.end(slow, JobState.failed)
    assert states([slow, quick]) == [JobState.failed, JobState.done]
    assert quick.row.message == ""


def test_a_job_that_has_ended_may_be_stopped_at_an_earlier_report(tmp_path):
    sweep = Sweep(tmp_path, Median(False, trials=1))
    slow, quick = sweep.add(2)
    sweep.start(slow), sweep.start(quick)
    report(quick.folder, 0.9, 0.1)
    sweep.end(quick, JobState.done)
    report(slow.folder, 0.2)
    sweep.stopping.poll()
    assert (quick.row.state, quick.row.objective, quick.row.epoch) == (JobState.stopped, 0.9, 1)


def test_a_last_report_of_the_whole_run_stops_nobody(tmp_path):
    sweep = Sweep(tmp_path, Threshold(False, bound=0.5, after=4))
    (job,) = sweep.add(1)
    process = sweep.start(job)
    report(job.folder, 0.9, 0.9, 0.9, 0.9)
    sweep.stopping.poll()
    assert process.sent == []
    sweep.end(job, JobState.done)
    assert job.row.state == JobState.done


def test_a_job_that_fails_before_it_starts_keeps_nobody_waiting(tmp_path):
    sweep = Sweep(tmp_path, Median(False, trials=1))
    failing, other = sweep.add(2)
    sweep.start(other)
    report(other.folder, 0.9)
    sweep.end(other, JobState.done)
    assert other.row.state == JobState.paused
    sweep.queue.remove(failing)
    failing.fail(ValueError("no such key"))
    sweep.stopping.poll()
    assert states([failing, other]) == [JobState.failed, JobState.done]


def test_a_task_of_another_app_is_compared_by_its_last_report_and_returns_its_value(tmp_path, caplog):
    sweep = Sweep(tmp_path, Threshold(False, 9.0), ours=False)
    first, silent = sweep.add(2)
    for job in (first, silent):
        sweep.start(job)
        job.row.objective = job.row.value = 7.0
    report(first.folder, 3.0, 2.0, steps=False)
    for job in (first, silent):
        sweep.end(job, JobState.done)
    assert (first.row.objective, first.row.metrics["value"], first.row.value) == (2.0, 7.0, 7.0)
    assert (silent.row.objective, silent.row.metrics) == (7.0, {})
    assert "job 1 is compared by its value: it reported no val/loss (objective.metric)" in caplog.text


def test_the_task_of_another_app_is_killed_if_it_does_not_heed_the_signal(tmp_path):
    sweep = Sweep(tmp_path, Threshold(False, bound=0.5), ours=False)
    (job,) = sweep.add(1)
    process = sweep.start(job)
    report(job.folder, math.nan, steps=False)
    sweep.stopping.poll()
    assert process.sent == [signal.SIGINT]
    assert sweep.running[0].kill_at is not None
    sweep.end(job, JobState.failed)
    assert (job.row.state, job.row.message) == (JobState.stopped, "stopped at report 1: its objective is NaN")
    assert math.isnan(job.result.return_value)


class TestKilled:
    """A sweep that was killed goes on in its folder."""

    def test_a_job_that_was_stopped_stays_so_and_others_are_judged_by_it(self, tmp_path):
        report(tmp_path / "0", 0.5, 0.4, 0.3, 0.2)
        report(tmp_path / "1", 0.9, 0.8)
        earlier = [
            JobRow(0, ["lr=0"], "0", JobState.done, 0.2, value=0.2),
            JobRow(1, ["lr=1"], "1", JobState.stopped, 0.9, step=5, value=0.9, message="stopped"),
        ]
        sweep = Sweep(tmp_path, Median(False, trials=2), earlier)
        done, stopped, new = sweep.add(3)
        assert (states([done, stopped]), stopped.row.message) == ([JobState.done, JobState.stopped], "stopped")
        assert [job.row.number for job in sweep.queue.jobs] == [2]
        process = sweep.start(new)
        report(new.folder, 0.8)  # worse than 0.7, the median of 0.5 and 0.9
        sweep.stopping.poll()
        assert process.sent == [signal.SIGINT]

    def test_a_job_that_had_ended_is_not_run_again(self, tmp_path):
        report(tmp_path / "1", 0.9, 0.8, 0.7)
        earlier = [
            JobRow(0, ["lr=0"], "0", JobState.interrupted, None),
            JobRow(1, ["lr=1"], "1", JobState.paused, 0.7, step=15, value=0.7, message=WAITS),
        ]
        (tmp_path / "1" / "summary.json").write_text('{"status": "done"}')
        sweep = Sweep(tmp_path, Median(False, trials=1), earlier)
        first, ended = sweep.add(2)
        assert [job.row.number for job in sweep.queue.jobs] == [0]
        assert (ended.row.state, ended.result.return_value, ended.is_ours) == (JobState.paused, 0.7, True)
        sweep.start(first)
        report(first.folder, 1.0, 0.9, 0.8, 0.7)
        sweep.end(first, JobState.done)
        assert states([first, ended]) == [JobState.done, JobState.done]

    @pytest.mark.parametrize(("step", "is_stopped"), [(10, True), (5, False), (None, False)])
    def test_what_was_reported_before_the_last_checkpoint_counts(self, step, is_stopped, tmp_path, monkeypatch):
        """A job that would be stopped at such a report is not started."""
        monkeypatch.setattr("ddp_hydra.sweep.stopping.saved_step", lambda run_dir: step)
        report(tmp_path / "0", 0.9, 0.8)
        earlier = [JobRow(0, ["lr=0"], "0", JobState.interrupted, 0.8, step=10)]
        sweep = Sweep(tmp_path, Threshold(False, bound=0.5, after=2), earlier)
        (job,) = sweep.add(1)
        assert bool(sweep.queue) != is_stopped
        assert (job.row.state == JobState.stopped) == is_stopped

    def test_a_job_that_is_stopped_before_it_goes_on_is_stopped_in_the_tables(self, tmp_path, monkeypatch):
        monkeypatch.setattr("ddp_hydra.sweep.stopping.saved_step", lambda run_dir: 10)
        report(tmp_path / "1", 0.9, 0.8)
        earlier = [JobRow(n, [f"lr={n}"], str(n), JobState.interrupted, 0.8, step=10) for n in range(2)]
        sweep = Sweep(tmp_path, Median(False, trials=1), earlier)
        first, waiting = sweep.add(2)
        shown = waiting.row  # the tables of the sweep have it from now on
        sweep.start(first)
        report(first.folder, 0.5)
        sweep.stopping.poll()
        assert (shown.state, shown.objective, shown.epoch) == (JobState.stopped, 0.9, 1)
        assert not sweep.queue


NINE_EPOCHS = {"epochs": 9, "max_steps": None, "pause_after_validations": None}
PAUSING = {**OURS, "trainer": NINE_EPOCHS}


class RungSweep:
    """The parts of a sweep that rungs need. Jobs report their lr as the loss, less a hundredth for each epoch."""

    def __init__(self, folder: Path, earlier: list[JobRow] | None = None) -> None:
        self.folder, config = folder, OmegaConf.create(PAUSING)
        self.queue = JobQueue(folder, None, config, Need(), earlier, False)  # type: ignore[arg-type]
        self.stopping = JobStopper(lambda: Rungs(maximize=False), self.queue, [], LOSS)

    def add(self, *lrs: float) -> list[PlannedJob]:
        jobs = [self.queue.add([f"optimizer.lr={lr}"], number) for number, lr in enumerate(lrs)]
        self.stopping.add(jobs)
        return jobs

    def run_next(self, *, fails: bool = False) -> tuple[int, int]:
        """Run the first job of the queue to its goal; return its number and the goal."""
        job = self.queue.jobs.pop(0)
        job.config, job.is_ours, job.folder = OmegaConf.create(PAUSING), True, self.folder / job.row.folder
        self.stopping.before_start(job)
        goal = job.config.trainer.pause_after_validations
        if not fails:
            report_epochs(job.folder, float(job.row.overrides[0].partition("=")[2]), min(goal, 9))
        job.row.state = JobState.failed if fails else JobState.done if goal >= 9 else JobState.paused
        self.stopping.on_end(job)
        return job.row.number, goal


def report_epochs(folder: Path, lr: float, epochs: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [{"step": 5 * n, "epoch": float(n), "val/loss": lr - n / 100} for n in range(1, epochs + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def row(number: int, lr: float, state: JobState, epochs: int) -> JobRow:
    return JobRow(number, [f"optimizer.lr={lr}"], str(number), state, lr, step=5 * epochs, value=lr)


def test_the_best_third_goes_on_and_the_others_are_stopped_at_the_end(tmp_path, caplog):
    caplog.set_level("INFO")
    sweep = RungSweep(tmp_path)
    jobs = sweep.add(0.3, 0.1, 0.2)
    assert [sweep.run_next() for _ in jobs] == [(0, 1), (1, 1), (2, 1)]
    assert [job.row.number for job in sweep.queue.jobs] == [1]
    assert "job 1 goes on to report 3: rung 0: place 1 of 3, and the best 1 go on" in caplog.text
    assert sweep.run_next() == (1, 3)
    assert not sweep.queue
    assert sweep.stopping.end_batch()  # so that one is trained
    assert "job 1 goes on to report 9: rung 1: no job has come to its end" in caplog.text
    assert sweep.run_next() == (1, 9)
    assert not sweep.stopping.end_batch()
    assert [job.row.state for job in jobs] == [JobState.stopped, JobState.done, JobState.stopped]
    message = "stopped at 1 of 9 epochs: rung 0: place 3 of 3, and the best 1 go on"
    assert (jobs[0].row.message, jobs[0].row.objective) == (message, 0.29)
    assert f"job 0 is {message}" in caplog.text


def test_jobs_with_other_data_are_judged_apart(tmp_path):
    sweep = RungSweep(tmp_path)
    lrs = {"easy": (0.01, 0.02, 0.03), "hard": (0.3, 0.1, 0.2)}
    words = [[f"optimizer.lr={lr}", f"data.target={target}"] for target, values in lrs.items() for lr in values]
    sweep.stopping.add([sweep.queue.add(own, number) for number, own in enumerate(words)])
    runs = [(0, 1), (1, 1), (2, 1), (0, 3), (3, 1), (4, 1), (5, 1), (4, 3)]
    assert [sweep.run_next() for _ in runs] == runs


def test_a_job_that_fails_holds_up_nobody(tmp_path):
    sweep = RungSweep(tmp_path)
    jobs = sweep.add(0.3, 0.1, 0.2)
    sweep.run_next()
    assert sweep.run_next(fails=True) == (1, 1)
    jobs[2].fail(ValueError("no such key"))
    sweep.stopping.poll()
    assert [job.row.number for job in sweep.queue.jobs] == [0]
    assert sweep.run_next() == (0, 3)


def test_a_killed_sweep_goes_on_where_each_job_stands(tmp_path):
    for number, lr, epochs in ((0, 0.3, 1), (1, 0.1, 3), (2, 0.2, 1)):
        report_epochs(tmp_path / str(number), lr, epochs)
    earlier = [row(0, 0.3, JobState.paused, 1), row(1, 0.1, JobState.paused, 3), row(2, 0.2, JobState.paused, 1)]
    sweep = RungSweep(tmp_path, earlier)
    jobs = sweep.add(0.3, 0.1, 0.2, 0.05)
    assert [job.row.state for job in jobs[:3]] == [JobState.paused] * 3
    assert [job.row.number for job in sweep.queue.jobs] == [3]
    assert jobs[1].row == earlier[1]
    assert sweep.run_next() == (3, 1)
    assert sweep.stopping.end_batch()
    assert sweep.run_next() == (1, 9)


def test_jobs_that_pause_by_themselves_are_refused(tmp_path):
    sweep = RungSweep(tmp_path)
    job = sweep.queue.add(["trainer.pause_after_validations=2"], 0)
    with pytest.raises(ConfigError, match="asha and hyperband pause jobs"):
        sweep.stopping.add([job])
    config = OmegaConf.create({**PAUSING, "trainer": {**NINE_EPOCHS, "pause_after_validations": 2}})
    sweep.queue.config = config
    with pytest.raises(ConfigError, match="asha and hyperband pause jobs"):
        JobStopper(lambda: Rungs(maximize=False), sweep.queue, [], LOSS)


def line(step: int | None, **metrics: Any) -> str:
    return json.dumps({"time": 1.0, "attempt": 0, "step": step, "epoch": 1, "samples": 8, **metrics}) + "\n"


def values(file: ReportFile) -> list[float]:
    return [report.value for report in file.reports]


def write(folder: Path, *lines: str, mode: str = "a") -> None:
    with (folder / "metrics.jsonl").open(mode) as file:
        file.write("".join(lines))


def test_lines_with_the_metric_are_reports_and_know_what_else_was_measured(tmp_path):
    file = ReportFile(tmp_path, "val/loss")
    assert not file.read()
    write(tmp_path, line(3, lr=0.1), line(4, **{"val/loss": 0.5}), line(6, lr=0.2))
    assert file.read()
    assert not file.read()
    write(tmp_path, line(8, **{"val/loss": None}), line(8, **{"val/loss": 9.0, "rank": 1}))
    assert file.read()
    assert [(report.step, report.epoch) for report in file.reports] == [(4, 1.0), (8, 1.0)]
    assert values(file)[0] == 0.5
    assert math.isnan(values(file)[1])
    assert [report.metrics["lr"] for report in file.reports] == [0.1, 0.2]


def test_a_line_counts_when_it_is_whole(tmp_path):
    file, text = ReportFile(tmp_path, "loss"), line(1, loss=0.5)
    write(tmp_path, text[:20])
    assert not file.read()
    write(tmp_path, text[20:], "garbage\n", "[1]\n", line(2, loss=True))
    assert file.read()
    assert values(file)[0] == 0.5
    assert len(values(file)) == 2


def test_steps_that_are_done_again_are_not_counted_twice(tmp_path):
    file = ReportFile(tmp_path, "loss")
    write(tmp_path, *(line(step, loss=step / 10) for step in (1, 2, 3)))
    file.read()
    other = tmp_path / "new"
    other.write_text(line(1, loss=0.1) + line(2, loss=0.2))
    other.replace(tmp_path / "metrics.jsonl")  # as a resumed job does
    assert not file.read()
    write(tmp_path, line(3, loss=0.3), line(4, loss=0.4))
    assert file.read()
    assert values(file) == [0.1, 0.2, 0.3, 0.4]
    before = ReportFile(tmp_path, "loss")
    before.read(last_step=2)
    assert values(before) == [0.1, 0.2], "what follows the last checkpoint may be left out"
