"""Defines everything that ddp_hydra raises on purpose, and how the failure of a rank is described.

Each message says what was given, what is allowed or was found, and what to type; the command line shows it without
a traceback. Workers and ranks load this module, too, so it imports little.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ddp_hydra.checked import Count, Time
from ddp_hydra.console.text import MESSAGE_CHARS, TRACE_CHARS, printable, ranges, shorten

FOLLOWERS = 20
"""Most messages of ranks that followed a failed one, in an error's text."""


class DdpHydraError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DdpHydraError):
    """The composed config cannot be a job."""


class TakenOver(ConfigError):
    """Another driver writes the results of this run."""


class ClusterError(DdpHydraError):
    """No cluster, or not enough workers in time."""


class SchedulerLost(ClusterError):
    """The scheduler has ended, or the connection to it is lost; the run may go on in another place."""


class RecordError(DdpHydraError):
    """A record is malformed, or its path leaves the run directory."""


class CheckpointError(DdpHydraError):
    """A checkpoint is missing, damaged, or not for this model."""


class DataError(DdpHydraError):
    """Too much of a data set cannot be read."""


class DiskFull(DdpHydraError):
    """A worker's temporary folder stays full."""


class OutOfMemory(DdpHydraError):
    """A rank's memory, or its GPU's, is full."""


class NonFiniteLoss(DdpHydraError):
    """A loss, gradient or weight is NaN or infinite, and trainer.on_nonfinite ends the job.

    Args:
        message: one sentence for a person.
        consequence: whether another rank had that loss, and this one only ends with it.
    """

    def __init__(self, message: str, consequence: bool = False) -> None:
        super().__init__(message)
        self.consequence = consequence


class WorldLeft(DdpHydraError):
    """The rank has left its world between two steps, as it was asked to; what it has trained is kept."""


class SweepFailed(DdpHydraError):
    """Some jobs of a sweep failed; the others have run."""


class RunFailed(DdpHydraError):
    """A run that another process executed failed; its summary.json has the reason."""


class Interrupted(KeyboardInterrupt):
    """The job was asked to end, and has saved a checkpoint if it had begun: it did not fail, but it is not done."""


class RankFailed(DdpHydraError):
    """A rank raised, exited, was killed, was lost with its worker, or hung.

    Args:
        message: one sentence for a person.
        failure: the root cause.
        symptoms: failures of other ranks that followed from the root cause.
    """

    def __init__(self, message: str, failure: Failure, symptoms: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.failure = failure
        self.symptoms = symptoms

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failure, self.symptoms)

    def add_reason(self, reason: str) -> None:
        """Append why there was no other attempt to the message."""
        self.args = (f"{self}\n\n{reason}",)


SYMPTOMS = re.compile(
    r"connection (was )?(closed|reset)|connection refused|broken pipe|timed out waiting|wait timeout"
    r"|socket (closed|timeout)|failed to (recv|send)|recvvalue failed|sendbytes failed|remote process exited"
    r"|nccl.*(unhandled system error|remote error|aborted)|no peer|process group has been aborted",
    re.IGNORECASE,
)
"""Matches the errors of a collective whose partner is gone (gloo, NCCL, TCPStore)."""


FailureKind = Literal["raised", "exited", "killed", "lost", "hung", "start"]


BY_CLIENT = ("lost", "hung")
"""Kinds of failures that the client notices; their times are by its clock."""


class Failure(Struct, frozen=True):
    """Describes one rank's failure. The rank says it; the client adds which rank it is, and where it was.

    Args:
        kind: raised, exited, killed, lost (with its worker), hung (no progress) or start (it never started).
        rank: the rank that failed.
        host: the host that it ran on.
        message: one line: the exception and its text, the signal, or the exit code.
        traceback: the Python traceback or the fatal-error stack; empty if there is none.
        time_s: time of the failure, in seconds since 1970 on the rank's clock.
        attempt: number of the gang's attempt, from 0.
        last_output: the last lines that the rank wrote.
        mistake: whether the exception tells the user what to change, so that its traceback adds nothing.
        step: step that the rank was in, counted from 1; 0 before the first, or if it did not report steps.
        phase: one of `heartbeat.PHASES`.
        consequence: whether the rank itself says that another rank was the cause.
        place: place in the user's files where it was raised; see `tracebacks.user_location`.
        deterministic: whether the project's code would raise it again.
    """

    kind: FailureKind
    rank: Count = 0
    host: str = ""
    message: str = ""
    traceback: str = ""
    time_s: Time = 0.0
    attempt: Count = 0
    last_output: str = ""
    mistake: bool = False
    step: Count = 0
    phase: str = ""
    consequence: bool = False
    place: str = ""
    deterministic: bool = False

    @property
    def is_symptom(self) -> bool:
        """Tell whether the failure looks like the consequence of another rank's end."""
        return self.consequence or (self.kind == "raised" and bool(SYMPTOMS.search(self.message)))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that summary.json shows."""
        names = ("kind", "rank", "host", "attempt", "step", "message", "place", "traceback")
        return {name: getattr(self, name) for name in names}

    def of_rank(self, rank: int, host: str, attempt: int, step: int, phase: str) -> Failure:
        """Return it with the rank that sent it, and with short texts without control characters."""
        longest = dict.fromkeys(("traceback", "last_output", "place"), TRACE_CHARS) | {"message": 2 * MESSAGE_CHARS}
        texts = {name: printable(shorten(getattr(self, name), most)) for name, most in longest.items()}
        return replace(self, rank=rank, host=host, attempt=attempt, step=step, phase=phase, **texts)


def root_cause(failures: Sequence[Failure]) -> tuple[Failure, tuple[Failure, ...]]:
    """Split failures, in the order in which they arrived, into the first one and those that followed from it.

    A crash goes before the "connection closed" of ranks that communicated with the dead one, even if the crash was
    reported later. Failures of one host are compared by its clock, others by their arrival: clocks of hosts differ.
    """
    order = sorted(failures, key=lambda failure: failure.is_symptom)
    on_host = [one for one in order if (one.host, one.is_symptom) == (order[0].host, order[0].is_symptom)]
    timed = [one for one in on_host if one.kind not in BY_CLIENT]
    cause = min(timed, key=lambda one: (one.time_s, one.rank)) if order[0] in timed else order[0]
    return cause, tuple(one for one in order if one is not cause)


def describe_exit(code: int, peak_rss: int = 0) -> tuple[FailureKind, str]:
    """Return kind and message of the failure of a process that sent no end record.

    Args:
        code: exit code, or minus the signal number.
        peak_rss: in bytes; shown for SIGKILL, which the kernel sends when memory runs out.
    """
    if code >= 0:
        return "exited", f"the process exited with code {code} before its work was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        memory = f"; its peak memory was {peak_rss / 2**20:,.0f} MiB" if peak_rss else ""
        return "killed", f"killed by {name}: by hand, or by the system because memory ran out{memory}"
    if -code == signal.SIGABRT:
        of_gloo = (
            "as gloo does where ranks exchange tensors of different sizes, such as their last batches of a validation"
        )
        return "killed", f"killed by {name}: by a library, {of_gloo}"
    return "killed", f"killed by {name}"


def explain(failure: Failure, symptoms: Sequence[Failure] = ()) -> str:
    """Describe a failure, and those that followed from it, for the user."""
    names_step = bool(re.search(rf"step {failure.step}\b", failure.message))
    last_heard = "last heard of " if failure.kind == "lost" else ""  # up to a second before
    where = [f"{last_heard}in step {failure.step}"] if failure.step and not names_step else []
    where += [failure.place] if failure.place and not failure.mistake else []
    lines = [f"rank {failure.rank} on {failure.host}: {failure.message}" + (f" ({'; '.join(where)})" if where else "")]
    if failure.traceback and not failure.mistake:
        lines += ["", failure.traceback.rstrip()]
    elif failure.last_output and not failure.mistake:
        lines += ["", "its last output:", *(f"  {line}" for line in failure.last_output.rstrip().splitlines()[-20:])]
    if others := [one for one in symptoms if one.message != failure.message]:
        said: dict[str, list[int]] = {}
        for other in others:
            said.setdefault(f"{other.message.partition(chr(10))[0]:.160}", []).append(other.rank)
        texts, not_shown = list(said.items())[:FOLLOWERS], list(said.values())[FOLLOWERS:]
        lines += ["", "the other ranks followed:", *(f"  rank {ranges(ranks)}: {text}" for text, ranks in texts)]
        if not_shown:
            lines.append(f"  rank {ranges(itertools.chain(*not_shown))}: with other messages")
    return "\n".join(lines)
