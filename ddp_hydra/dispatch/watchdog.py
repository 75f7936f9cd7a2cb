"""Checks what no record tells: tasks that failed, silent hosts, hangs, Ctrl-C."""

from __future__ import annotations

import logging
import time

from distributed import Client

from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.cluster.scheduler_plugin import SUSPENDED_S
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.console.text import MESSAGE_CHARS
from ddp_hydra.dispatch.health import Hang, HealthMonitor, RankStates, waits
from ddp_hydra.dispatch.placement import ranges
from ddp_hydra.dispatch.workers import CALL_S, WorkerClient
from ddp_hydra.errors import ConfigError, SchedulerLost
from ddp_hydra.rank import rank_process
from ddp_hydra.rank.spec import JobSpec

log = logging.getLogger(__name__)
CHECK_S = 0.5
"""Seconds between two checks."""
PENDING_S = 2.0
"""Seconds between two looks for the workers of ranks that have not started."""
LOOP_START_S = 0.5
"""Seconds after Ctrl-C in which the ranks may report that their loop has just begun."""

LEFT = "its worker {worker} left the cluster (killed, out of memory, or its host is gone)"


class Watchdog:
    """Checks the ranks of one attempt every now and then.

    Args:
        client: of the Dask cluster.
        job: what the workers are sent, without the call.
        interrupts: says whether the user wants to end.
    """

    def __init__(self, client: Client, job: JobSpec, interrupts: Interrupts) -> None:
        self.client, self.job, self.settings, self.specs = client, job, job.settings, list(job.ranks)
        self.interrupts, self.workers = interrupts, WorkerClient(client, job)
        timeouts = (getattr(job.settings, f"{name}_timeout_s") for name in ("hang", "first_step", "start"))
        self.health = HealthMonitor(*timeouts)
        self.rank_states = RankStates(self.specs, job.attempt, self.health)
        self.silent: set[str] = set()
        self.stacks: dict[int, str] = {}
        self.begun_at = self.asked_at = time.monotonic()
        self.interrupted_at: float | None = None
        self.finish_by: float | None = None

    def handle_next(self, timeout_s: float) -> bool:
        """Handle the next event; return False if none came in time."""
        raise NotImplementedError

    def check_records(self) -> None:
        """Raise the error of a record that could not be read."""
        raise NotImplementedError

    def check(self) -> None:
        self.health.look(time.monotonic())
        self.check_records()
        self.check_interrupt()
        self.check_tasks()

    def check_progress(self) -> None:
        self.check_silence()
        hang = self.health.hang(self.rank_states.running, time.monotonic())
        if hang is not None:
            self.report_hang(hang)

    def check_interrupt(self) -> None:
        """Ask the ranks to finish if the user wants to end.

        Raises:
            KeyboardInterrupt: the ranks are not in their loop, or did not finish in time.
        """
        if not self.interrupts.wanted:
            return
        if self.finish_by is None:
            self.interrupted_at = self.interrupted_at or time.monotonic()
            if not self.health.in_loop(self.rank_states.running):
                if time.monotonic() - self.interrupted_at < LOOP_START_S:
                    return
                raise KeyboardInterrupt
            self.finish_by = time.monotonic() + self.settings.grace_s
            self.workers.finish(self.rank_states.running, "interrupt")
        elif time.monotonic() > self.finish_by:
            raise KeyboardInterrupt

    def check_tasks(self) -> None:
        """Check for tasks that failed, were cancelled with the scheduler, or did not start in time."""
        running = [self.specs[rank] for rank in self.rank_states.running]
        futures = {spec.worker: self.workers.futures[spec.worker] for spec in running}
        # Dask's client cancels all its tasks when it loses the scheduler, or when somebody restarts the cluster.
        is_closed = self.workers.client.status == "closed"
        if is_closed or any(future.status in ("cancelled", "lost") for future in futures.values()):
            how = "is lost, or was restarted"
            if self.health.away_s > SUSPENDED_S:
                how = f"has given the workers to others: this program was suspended for {self.health.away_s:.0f} s"
            raise self.scheduler_lost(how)
        failed = {address: future for address, future in futures.items() if future.status == "error"}
        for spec in running:
            if spec.worker in failed:
                if isinstance(error := failed[spec.worker].exception(), ConfigError):  # another version of ddp_hydra
                    raise error
                reason = repr(error)[:MESSAGE_CHARS]
                message = f"its task ended before it did: {reason}; is ddp_hydra installed on worker {spec.worker}?"
                self.rank_states.fail(spec, "start", message)
        self.check_pending()
        late, limit_s = self.rank_states.late, self.settings.start_timeout_s
        if late and time.monotonic() - self.begun_at > limit_s:
            what = f"rank {ranges(late)} of {len(self.specs)} had not started after"
            message = f"{what} dispatch.start_timeout_s={limit_s:g}: the workers are busy with other tasks, or stuck"
            self.rank_states.fail(self.specs[late[0]], "start", message, ended=False)

    def check_pending(self) -> None:
        """Notice a worker that left before the scheduler could report it: its task would wait for ever."""
        now = time.monotonic()
        late = self.rank_states.late
        if not late or now - self.asked_at < PENDING_S:
            return
        self.asked_at = now
        known = workers_of(self.workers.client)
        for address in {self.specs[rank].worker for rank in late} - known.keys() - self.workers.lost:
            self.lose_worker(address, LEFT.format(worker=address))

    def scheduler_lost(self, how: str) -> SchedulerLost:
        self.workers.is_cut_off = True
        return SchedulerLost(f"the scheduler {self.workers.scheduler} {how}; its workers stop the ranks")

    def check_silence(self) -> None:
        """Give up workers that have been silent for too long.

        Raises:
            SchedulerLost: it is the scheduler that is silent.
        """
        limit_s = self.settings.lost_timeout_s
        silent = self.health.overdue(self.rank_states.running, time.monotonic(), limit_s)
        if silent and not self.workers.scheduler_answers():
            raise self.scheduler_lost(f"was not heard for {limit_s:g} s")
        for rank in silent:
            address = self.specs[rank].worker
            self.silent.add(address)
            what = f"nothing was heard from its worker {address} for dispatch.lost_timeout_s={limit_s:g}"
            self.lose_worker(address, f"{what}: its host is down, or cut off")

    def lose_worker(self, address: str, how: str) -> None:
        self.workers.lost.add(address)
        for spec in self.specs:
            if spec.worker == address and spec.rank not in self.rank_states.ended:
                self.rank_states.fail(spec, "lost", how)

    def overdue(self) -> list[int]:
        self.check_silence()
        return self.health.overdue(self.rank_states.running, time.monotonic(), 2.5 * rank_process.BEAT_S)

    def report_hang(self, hang: Hang) -> None:
        """Report a hang as a failure: have all ranks print their stacks, and name the rank that holds up the others."""
        states, health, now, time_s = self.rank_states, self.health, time.monotonic(), time.time()
        before = dict(health.heartbeats), dict(health.arrived_s)
        running = states.running
        self.workers.send({"stacks": True}, running)
        until = now + 2 * rank_process.STACK_S + CALL_S
        while not states.is_over and not self.stacks.keys() >= set(states.running) and time.monotonic() < until:
            self.handle_next(0.05)
        health.heartbeats, health.arrived_s = before  # a suspended rank was woken to print its stack, and has moved on
        waiting = [rank for rank in running if waits(self.stacks.get(rank, ""))]
        hang = self.health.hang(running, now, waiting) or hang
        stack = self.stacks.get(hang.rank, "")
        found = states.failure("hung", self.specs[hang.rank], hang.message, time_s=time_s, traceback=stack)
        states.failures.insert(0, found)
