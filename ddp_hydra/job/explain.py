"""Turn an error into the message that a user reads."""

from __future__ import annotations

from hydra.errors import CompactHydraException, InstantiationException

from ddp_hydra.config import unknown_keys
from ddp_hydra.console.text import traceback_of
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
    return traceback_of(error)
