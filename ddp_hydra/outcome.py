"""How a rank ended, and which of several failures was the cause of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_hydra.text import MESSAGE_CHARS, TRACE_CHARS, plain, shorten

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


def root_cause(failures: Sequence[Failure]) -> tuple[Failure, tuple[Failure, ...]]:
    """Split failures into the one that came first and those that followed from it.

    A crash outranks the "connection closed" of those who talked to the dead rank, even where the news of
    the crash came later.
    """
    assert failures, "no failure to explain"
    order = sorted(failures, key=lambda failure: (failure.is_symptom, failure.time_s, failure.rank))
    return order[0], tuple(order[1:])


def describe_exit(code: int, peak_rss: int = 0) -> tuple[str, str]:
    """Name the end of a process that said nothing itself.

    Args:
        code: exit code, or minus the signal number.
        peak_rss: bytes; shown for SIGKILL, which is what the kernel sends when memory runs out.

    Returns:
        kind and message.
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
    return "killed", f"killed by {name}"


def explain(failure: Failure, symptoms: Sequence[Failure] = (), log: str | None = None) -> str:
    """Say what happened, for a person."""
    told = bool(re.search(rf"step {failure.step}\b", failure.message))
    where = [f"in step {failure.step}"] if failure.step and not told else []
    where += [failure.place] if failure.place and not failure.mistake else []
    lines = [f"rank {failure.rank} on {failure.host}: {failure.message}" + (f" ({'; '.join(where)})" if where else "")]
    if failure.traceback and not failure.mistake:
        lines += ["", failure.traceback.rstrip()]
    elif failure.said and not failure.mistake:
        lines += ["", "its last words:", *(f"  {line}" for line in failure.said.rstrip().splitlines()[-20:])]
    if symptoms:
        lines += ["", "the other ranks followed:"]
        lines += [f"  rank {other.rank}: {other.message.partition(chr(10))[0]:.160}" for other in symptoms]
    if log:
        lines += ["", f"full logs: {log}"]
    return "\n".join(lines)
