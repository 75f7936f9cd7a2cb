"""Brings the `JobReturn` of a job, and its error, from the job's process to the sweep's, in little space."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from ddp_hydra.console.text import message_of
from ddp_hydra.errors import DdpHydraError

DICTIONARY_BYTES = 2**15
"""Size of zlib's dictionary, which is the end of a config: configs differ least there."""


class CompactReturn(JobReturn):
    """Keeps the configs of a result compressed: those of hundreds of jobs would fill the memory of the sweep.

    Args:
        result: the one that it replaces.
    """

    def __init__(self, result: JobReturn) -> None:
        self.__dict__.update(vars(result))
        for name in ("cfg", "hydra_cfg"):
            setattr(self, name, self.__dict__.pop(name, None))

    def shrink(self, other: CompactReturn) -> None:
        """Compress the configs again, by what they have in common with those of another result: nearly all.

        Args:
            other: it is kept as long as this one; nothing is done if it is this one.
        """
        if other is self:
            return
        for name in ("_cfg", "_hydra_cfg"):
            content = self._decompressed(name)
            packer = zlib.compressobj(1, zdict=other._decompressed(name)[-DICTIONARY_BYTES:])
            self.__dict__[name] = packer.compress(content) + packer.flush()
        self._other = other

    def _decompressed(self, name: str) -> bytes:
        other: CompactReturn | None = self.__dict__.get("_other")
        shared = b"" if other is None else other._decompressed(name)[-DICTIONARY_BYTES:]
        return zlib.decompressobj(zdict=shared).decompress(self.__dict__[name])

    def _unpacked(self, name: str) -> Any:
        return pickle.loads(self._decompressed(name))  # noqa: S301, pickled by this class

    def _pack(self, name: str, value: Any) -> None:
        self.__dict__[name] = zlib.compress(pickle.dumps(value), 1)

    cfg = property(lambda self: self._unpacked("_cfg"), lambda self, value: self._pack("_cfg", value))
    hydra_cfg = property(lambda self: self._unpacked("_hydra_cfg"), lambda self, value: self._pack("_hydra_cfg", value))


def portable(result: JobReturn) -> CompactReturn:
    """Return a small result that can be pickled; an error or value that cannot be is described by one that can."""
    try:
        compact = CompactReturn(result)
        pickle.loads(pickle.dumps(compact))  # noqa: S301, pickled just now
    except Exception as reason:
        value = result._return_value
        if result.status == JobStatus.FAILED:
            result._return_value = RuntimeError(describe_error(value))
        else:
            result.status = JobStatus.FAILED
            result._return_value = TypeError(
                f"the task returned a {type(value).__name__}, which cannot be sent to the sweep's process: {reason}"
            )
        return CompactReturn(result)
    return compact


class RemoteTraceback(Exception):
    """Carries a traceback from the job's process, as the cause of an error."""

    def __str__(self) -> str:
        return f"in the job's process:\n{self.args[0]}"


def with_trace(result: JobReturn, trace: str) -> JobReturn:
    """Add to an error the traceback that it had in the job's process. Hydra 1.4 does that itself."""
    error = result._return_value
    if isinstance(error, BaseException) and getattr(result, "_remote_traceback", None) is None:
        error.__cause__ = RemoteTraceback(trace)
    return result


def describe_error(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, DdpHydraError):
        return first_line(str(error))
    return first_line(": ".join(filter(None, [type(error).__name__, message_of(error)])))


def first_line(text: str) -> str:
    """Return the first line of a text, and the next one if the first ends with a colon, as in errors of Hydra."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    end = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines))
    return " ".join(lines[: end + 1])
