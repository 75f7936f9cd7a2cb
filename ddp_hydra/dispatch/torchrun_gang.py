"""Runs a job on the ranks that torchrun has started: in the process of rank 0, and in the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from ddp_hydra.console.signals import Interrupts, handled
from ddp_hydra.dispatch import torchrun
from ddp_hydra.dispatch.attempt import Attempt
from ddp_hydra.dispatch.call import Call
from ddp_hydra.dispatch.gang import Gang
from ddp_hydra.dispatch.restarts import Restarts
from ddp_hydra.dispatch.torchrun_attempt import TorchrunAttempt, TorchrunInterrupts, reason_of
from ddp_hydra.errors import ClusterError, DdpHydraError, RankFailed, explain
from ddp_hydra.rank import inbox, return_values
from ddp_hydra.rank.spec import GangSettings, RankSpec
from ddp_hydra.rank.torchrun_channel import GANG, Channel, Outcome, connect
from ddp_hydra.rank.torchrun_task import TorchrunTask, TorchrunWorker
from ddp_hydra.record import End, Record


class TorchrunGang(Gang):
    """The ranks that torchrun has started, as the process of rank 0 sees them; torchrun starts them again.

    Args:
        own: the task of rank 0, which has forked it.
        settings: of the gang.
        run_dir_path: the run directory, for the next start; see `torchrun.remember`.

    Attributes:
        numbers: by dotted keys; they replace the config's on all ranks.
    """

    def __init__(self, own: TorchrunTask, settings: GangSettings, run_dir_path: str) -> None:
        super().__init__(cast(Any, None), settings=settings)
        self.interrupts: Interrupts = TorchrunInterrupts(self.end_notice)
        self.own, self.run_dir_path = own, run_dir_path
        self.numbers: Mapping[str, int] = {}

    def run_attempts(
        self,
        call_of: Callable[[int, int], Call],
        write: Callable[[Record], None] | None = None,
        *,
        first_attempt: int = 0,
        notice: Callable[[], str] | None = None,
        goes_on: Callable[[int], str] = lambda done: "",
        on_give_up: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Run the one attempt that torchrun has started; see `Gang.run_attempts`."""
        self.readers, self.notice = [read for read in (write,) if read is not None], notice
        self.restarts = Restarts(self.settings.max_restarts)
        with self.interrupts.caught(self.settings.grace_s > 0):
            self.attempt = attempt = TorchrunAttempt(
                self, self.own, first_attempt, self.numbers, self.run_dir_path, on_give_up
            )
            try:
                return self.run_attempt(attempt, call_of(attempt.number, len(attempt.specs)))
            except RankFailed as error:
                self.decide_restart(error)  # which notes the attempt, and raises
                raise

    def run_attempt(self, attempt: Attempt, call: Call) -> list[Any]:
        self.world_size = len(attempt.specs)
        kwargs = {**call.kwargs, "files": {name: str(path) for name, path in call.files.items()}}
        with self.interrupts.deferred():
            return attempt.run(return_values.encode([call.fn, list(call.args), kwargs]))

    def end(self, outcome: Outcome) -> None:
        if isinstance(self.attempt, TorchrunAttempt):
            self.attempt.server.say_goodbye(outcome)
            self.attempt.server.close()


@contextmanager
def rank_0(spec: RankSpec, settings: GangSettings, run_dir: str) -> Iterator[TorchrunGang]:
    """Start rank 0 below this process; after the block, all processes know how the job has ended."""
    with forked(spec, lambda server: None) as task:
        gang = TorchrunGang(task, settings, run_dir)
        outcome = Outcome("done")
        try:
            yield gang
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first process has ended
            task.rank.kill()
            gang.end(outcome)
            write_error_file(spec.rank, outcome)


def run_other_rank(spec: RankSpec, call: Callable[[], bytes], settings: GangSettings) -> Outcome:
    """Run a rank other than 0 below this process, and return how the job has ended.

    Raises:
        DdpHydraError: the process of rank 0 could not be told how this rank failed, or is gone.
    """
    other = OtherRank(spec, settings.lost_timeout_s)
    with forked(spec, other.meet) as other.task, handled(other.on_signal):
        try:
            other.task.give(settings, call())
            end = other.task.run_to_end()
            outcome = other.outcome(end)
        except Exception as error:
            write_error_file(spec.rank, Outcome("failed", spec.rank, str(error), time.time()))
            raise
        finally:
            if other.channel is not None:
                other.channel.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in `rank_0`
    write_error_file(spec.rank, outcome)
    return outcome


class OtherRank:
    """Connects a rank other than 0 with the process of rank 0.

    Args:
        spec: the rank's place.
        lost_timeout_s: for how long the process of rank 0 may be silent.
    """

    task: TorchrunTask

    def __init__(self, spec: RankSpec, lost_timeout_s: float) -> None:
        self.spec, self.lost_timeout_s = spec, lost_timeout_s
        self.channel: Channel | None = None
        self.error: ClusterError | None = None

    def meet(self, server: Mapping[str, Any]) -> None:
        """Connect with the process of rank 0; the rank has heard where it is."""
        torchrun.remember(str(server.get("run_dir", "")))
        try:
            connection = connect(server, self.spec, self.lost_timeout_s)
        except ClusterError as error:
            self.error = error
            self.task.give_up()
            return
        self.channel = Channel(connection, self.spec.rank, self.task.own_worker, self.task.box)
        self.task.own_worker.send_by(self.channel.send)

    def on_signal(self, number: int, frame: Any) -> None:
        """Have the process of rank 0 decide what happens after a signal; without it, end at once."""
        if self.channel is None:
            raise KeyboardInterrupt
        self.task.box.put({"told_to_end": reason_of(number)})

    def outcome(self, end: End) -> Outcome:
        """Wait until the process of rank 0 has written the results, and return how the job has ended.

        Raises:
            DdpHydraError: it does not say.
        """
        while self.channel is not None and not self.channel.over.wait(0.5) and not self.task.has_lost_torchrun:
            pass
        if self.channel is not None and self.channel.outcome is not None:
            return self.channel.outcome
        if self.error is not None:
            raise self.error
        if self.task.has_lost_torchrun:
            raise ClusterError(f"rank {self.spec.rank}: torchrun was killed, so this rank was stopped")
        if end.failure is not None:
            raise DdpHydraError(explain(end.failure.of_rank(self.spec.rank, self.spec.host, 0, end.step, end.phase)))
        raise ClusterError(
            f"rank {self.spec.rank} on {self.spec.host} was stopped, because the process of rank 0 is gone, or its "
            "host can't be reached"
        )


@contextmanager
def forked(spec: RankSpec, on_server: Callable[[Mapping[str, Any]], None]) -> Iterator[TorchrunTask]:
    """Fork a rank; after the block, nothing is left of it.

    Args:
        spec: its place.
        on_server: called when the rank has heard where the process of rank 0 is.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder, ExitStack() as stack:
        task = TorchrunTask(spec, TorchrunWorker(spec.worker, folder), on_server, stack)
        stack.callback(inbox.remove, GANG, spec.worker, 0)
        task.rank.fork()
        yield task


def outcome_of(error: BaseException) -> Outcome:
    """Return what the other ranks are told of an error of rank 0's process."""
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted")
    if isinstance(error, RankFailed):
        failure = error.failure
        message = explain(replace(failure, traceback="", last_output=""))
        return Outcome("failed", failure.rank, message, failure.time_s)
    return Outcome("failed", 0, str(error), time.time())


def write_error_file(rank: int, outcome: Outcome) -> None:
    """Write the file from which torchrun takes what it says of a failure: the same cause for all ranks."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or outcome.status != "failed":
        return
    is_cause, text = rank == outcome.rank, outcome.message
    if not is_cause:
        text = f"this rank was stopped, because rank {outcome.rank} had failed: {text}"
    # torchrun takes the earliest failure for the cause.
    time_s = str(int(outcome.time_s or time.time()) + (not is_cause))
    # It shows the stack instead of the message; the traceback is what rank 0 prints.
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": time_s}}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(content))
