"""Describes how a rank ended, and finds the failure that caused the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ddp_hydra.errors import Failure


def root_cause(failures: Sequence[Failure]) -> tuple[Failure, tuple[Failure, ...]]:
    """Split failures into the first one and those that followed from it.

    A crash goes before the "connection closed" of ranks that communicated with the dead one, even if the crash was
    reported later.
    """
    assert failures, "no failure to explain"
    order = sorted(failures, key=lambda failure: (failure.is_symptom, failure.time_s, failure.rank))
    return order[0], tuple(order[1:])


def describe_exit(code: int, peak_rss: int = 0) -> tuple[str, str]:
    """Describe the end of a process that sent no end record.

    Args:
        code: exit code, or minus the signal number.
        peak_rss: in bytes; shown for SIGKILL, which the kernel sends when memory runs out.

    Returns:
        Kind and message of the failure.
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


def explain(failure: Failure, symptoms: Sequence[Failure] = ()) -> str:
    """Describe a failure, and those that followed from it, for the user."""
    names_step = bool(re.search(rf"step {failure.step}\b", failure.message))
    where = [f"in step {failure.step}"] if failure.step and not names_step else []
    where += [failure.place] if failure.place and not failure.mistake else []
    lines = [f"rank {failure.rank} on {failure.host}: {failure.message}" + (f" ({'; '.join(where)})" if where else "")]
    if failure.traceback and not failure.mistake:
        lines += ["", failure.traceback.rstrip()]
    elif failure.last_output and not failure.mistake:
        lines += ["", "its last output:", *(f"  {line}" for line in failure.last_output.rstrip().splitlines()[-20:])]
    if symptoms:
        lines += ["", "the other ranks followed:"]
        lines += [f"  rank {other.rank}: {other.message.partition(chr(10))[0]:.160}" for other in symptoms]
    return "\n".join(lines)
