"""A disk that refuses what is written."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """Let the system refuse longer files of this process, with EFBIG.

    Modules that are imported meanwhile leave no bytecode: Python would leave the first `n_bytes` of it, and each later
    import of these modules would fail.
    """
    before, writes_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_bytecode
