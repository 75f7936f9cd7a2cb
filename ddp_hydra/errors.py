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
a traceback. Nothing is imported here: workers and ranks load this module, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_hydra.outcome import Failure


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
