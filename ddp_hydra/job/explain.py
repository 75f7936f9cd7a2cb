"""Turns an error into the message that a user reads."""

from __future__ import annotations

from hydra.errors import CompactHydraException, InstantiationException

from ddp_hydra.config import unknown_keys
from ddp_hydra.console import tracebacks
from ddp_hydra.console.text import TRACE_CHARS, message_of, shorten, traceback_of
from ddp_hydra.errors import DdpHydraError


def explain(error: Exception) -> str:
    """Return the message of our errors and of Hydra's with their notes; the traceback of any other error."""
    if isinstance(error, DdpHydraError):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, CompactHydraException | InstantiationException):  # the second is the first in Hydra 1.3 only
        # Hydra advises to append an unknown key, which does not help with a misspelt one.
        return unknown_keys.explain(error.__cause__) or "\n".join(
            str(part) for part in (error, error.__cause__) if part
        )
    if getattr(error, "mistake", False):  # as in `rank.process.describe`
        return message_of(error)
    if where := tracebacks.place(error):
        told = tracebacks.shortened(error, others="HYDRA_FULL_ERROR=1 shows them")
        return f"{type(error).__name__}: {message_of(error)} ({where})\n\n{shorten(told, TRACE_CHARS)}"
    return traceback_of(error)
