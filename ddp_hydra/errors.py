"""Everything that ddp_hydra raises on purpose.

DdpHydraError
├── ConfigError            the composed config cannot be a job
│   └── TakenOver          another driver writes the results of this run
├── ClusterError           no cluster, or not enough workers in time
│   └── SchedulerLost      the connection to the scheduler is cut, or it has ended
├── RecordError            a record is malformed, or points out of the run directory
├── CheckpointError        a checkpoint is missing, damaged, or not for this model
├── DataError              too much of a data set can't be read
├── OutOfMemory            a rank's memory, or its GPU's, is full
├── DiskFull               a worker's temporary folder is full, and stays so
├── NonFiniteLoss          a loss, gradient or weight is NaN or infinite, and trainer.on_nonfinite says to give up
├── SweepFailed            some jobs of a sweep failed
├── RunFailed              a run failed that another process ran; its summary.json says how
└── JobFailed              the gang failed; carries the root cause
    └── RankFailed         a rank raised, exited, was killed, was lost with its worker, or hung

Interrupted, a KeyboardInterrupt, is the end that was asked for.

Each message says what was given, what is allowed or was found, and what to type; the command line shows it without
a traceback. Workers and ranks load this module, too: it imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ddp_hydra.console.text import MESSAGE_CHARS, TRACE_CHARS, plain, shorten


class DdpHydraError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DdpHydraError):
    """The composed config cannot be a job."""


class TakenOver(ConfigError):
    """Another driver writes the results of this run."""


class ClusterError(DdpHydraError):
    """No cluster, or not enough workers in time."""


class SchedulerLost(ClusterError):
    """The connection to the scheduler is cut, or it has ended: the run may go on from elsewhere."""


class RecordError(DdpHydraError):
    """A record is malformed, or points out of the run directory."""


class CheckpointError(DdpHydraError):
    """A checkpoint is missing, damaged, or not for this model."""


class DataError(DdpHydraError):
    """Too much of a data set can't be read."""


class DiskFull(DdpHydraError):
    """A worker's temporary folder is full, and stays so."""


class OutOfMemory(DdpHydraError):
    """A rank's memory, or its GPU's, is full."""


class NonFiniteLoss(DdpHydraError):
    """The loss is NaN or infinite.

    Args:
        message: one sentence for a person.
        consequence: it was another rank's loss; this one goes along.
    """

    def __init__(self, message: str, consequence: bool = False) -> None:
        super().__init__(message)
        self.consequence = consequence


class SweepFailed(DdpHydraError):
    """Some jobs of a sweep failed; the others were run all the same."""


class RunFailed(DdpHydraError):
    """A run failed that another process ran; its summary.json says how."""


class Interrupted(KeyboardInterrupt):
    """The job was asked to end, and has saved what it had: no failure, but not done."""


class JobFailed(DdpHydraError):
    """The gang failed.

    Args:
        message: one sentence for a person.
        failure: the root cause.
        symptoms: failures of other ranks that followed from it.
    """

    def __init__(self, message: str, failure: Failure, symptoms: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.failure = failure
        self.symptoms = symptoms

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failure, self.symptoms)

    def add_reason(self, reason: str) -> None:
        """Say, too, why there was no other attempt."""
        self.args = (f"{self}\n\n{reason}",)


class RankFailed(JobFailed):
    """A rank raised, exited, was killed, was lost with its worker, or hung."""


SYMPTOMS = re.compile(
    r"connection (was )?(closed|reset)|connection refused|broken pipe|timed out waiting|wait timeout"
    r"|socket (closed|timeout)|failed to (recv|send)|recvvalue failed|sendbytes failed|remote process exited"
    r"|nccl.*(unhandled system error|remote error|aborted)|no peer|process group has been aborted",
    re.IGNORECASE,
)
"""What a collective says when its partner is gone (gloo, NCCL, TCPStore)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure.

    Args:
        kind: raised, exited, killed, lost (its worker went away), hung (no progress) or start (it never came up).
        rank: who.
        host: where.
        message: one line: the exception and its text, the signal, or the exit code.
        traceback: the Python traceback or the fatal-error stack, empty where there is none.
        time_s: when, seconds since the epoch on the rank's host.
        attempt: which start of the gang.
        said: the last lines that the rank wrote.
        mistake: the exception says what the user has to change, so its traceback adds nothing.
        step: the step it was in, counted from 1; 0 before the first or where it said nothing of steps.
        phase: what it was doing; see `pulse.PHASES`.
        consequence: it says itself that another rank was the cause.
        place: where in the user's files it was raised; see `tracebacks.place`.
        deterministic: code of the project would raise it again.
    """

    kind: str
    rank: int
    host: str
    message: str
    traceback: str = ""
    time_s: float = 0.0
    attempt: int = 0
    said: str = ""
    mistake: bool = False
    step: int = 0
    phase: str = ""
    consequence: bool = False
    place: str = ""
    deterministic: bool = False

    @property
    def is_symptom(self) -> bool:
        """Whether it reads as the echo of another rank's end."""
        return self.consequence or (self.kind == "raised" and bool(SYMPTOMS.search(self.message)))

    def as_dict(self) -> dict[str, Any]:
        """What summary.json shows."""
        fields = asdict(self)
        return {
            key: fields[key] for key in ("kind", "rank", "host", "attempt", "step", "message", "place", "traceback")
        }

    @classmethod
    def from_end(cls, end: Mapping[str, Any], rank: int, host: str, attempt: int) -> Failure | None:
        """Read an end record; None where the rank ended well or because it was told to."""
        status = end.get("status")
        if status in ("ok", "stopped"):
            return None
        text = {key: harmless(end.get(key, ""), TRACE_CHARS) for key in ("traceback", "said", "phase", "place")}
        text["message"] = harmless(end.get("message", ""), 2 * MESSAGE_CHARS)
        flags = {key: bool(end.get(key)) for key in ("mistake", "consequence", "deterministic")}
        step = end.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
            step = 0
        time_s = end.get("time_s")
        if isinstance(time_s, bool) or not isinstance(time_s, (int, float)) or not 0 <= time_s < 1e11:
            time_s = 0.0
        more: dict[str, Any] = {**text, **flags, "step": step, "time_s": time_s, "attempt": attempt}
        return cls(harmless(status, MESSAGE_CHARS), rank, host, **more)


def harmless(value: Any, most: int) -> str:
    """Make a text of what a rank says, fit for a terminal."""
    return plain(shorten(str(value), most))
