"""How a rank ended, and which of several failures was the cause of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ddp_hydra.errors import Failure


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


def explain(failure: Failure, symptoms: Sequence[Failure] = ()) -> str:
    """Say what happened, for a person."""
    told = bool(re.search(rf"step {failure.step}\b", failure.message))
    where = [f"in step {failure.step}"] if failure.step and not told else []
    where += [failure.place] if failure.place and not failure.mistake else []
    lines = [f"rank {failure.rank} on {failure.host}: {failure.message}" + (f" ({'; '.join(where)})" if where else "")]
    if failure.traceback and not failure.mistake:
        lines += ["", failure.traceback.rstrip()]
    elif failure.last_output and not failure.mistake:
        lines += ["", "its last words:", *(f"  {line}" for line in failure.last_output.rstrip().splitlines()[-20:])]
    if symptoms:
        lines += ["", "the other ranks followed:"]
        lines += [f"  rank {other.rank}: {other.message.partition(chr(10))[0]:.160}" for other in symptoms]
    return "\n".join(lines)
