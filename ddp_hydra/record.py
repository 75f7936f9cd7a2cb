"""What a rank sends: a record, with a struct for each kind. What is decoded is checked: ranks are not trusted."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from msgspec import Meta, Struct, convert, to_builtins

from ddp_hydra.checked import Count, Finite, Name, NonNegative, Time, prepare
from ddp_hydra.errors import Failure, RecordError
from ddp_hydra.heartbeat import DONE, PHASES, Phase

Rank = Annotated[int, Meta(ge=0, le=10**6)]
Positive = Annotated[int, Meta(gt=0, le=2**63 - 1)]
MOST_COUNTS = 1024
RESERVED = ("tensorboard", "checkpoints", "logs")
"""Folders of a run directory that belong to the run. A submitted file goes into another folder, and never into the run
directory itself, whose files tell how far a run is and how it ended."""


class Data(Struct, frozen=True, tag_field="kind", tag=str.lower):
    """What a record holds; the name of the class is the record's kind."""


class Up(Data, frozen=True):
    """The rank is being started; from rank 0, with the address where the ranks meet."""

    rendezvous: tuple[str, int] | None = None


class Beat(Data, frozen=True):
    """The rank's progress, about once a second: see `heartbeat.Place`; for how long it has been there.

    It may be suspended (SIGSTOP, a debugger), or be writing a checkpoint.
    """

    step: Count = 0
    phase: Phase = "join"
    first: bool = False
    age_s: NonNegative = 0.0
    stopped: bool = False
    saving: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Return a sort key: all ranks pass the same places in the same order."""
        return self.step, PHASES.index(self.phase)

    @property
    def steps_done(self) -> int:
        return self.step if self.phase in DONE else max(0, self.step - 1)


class Start(Data, frozen=True):
    """The training begins, at the record's step; `best` is the objective's best value until there, if it has one."""

    lines: list[str] = []
    total_steps: Count | None = None
    epochs: NonNegative | None = None
    world_size: Count = 0
    epoch_means: bool = False
    checkpoint_bytes: Count = 0
    show: list[str] | None = None
    best: dict[Name, float] = {}


class RolledBack(Data, frozen=True):
    """The steps after the record's step are taken again, in the same attempt."""


class Rows(Data, frozen=True):
    """A prediction begins: its number of rows, None while that is not known, and the rows of a full part."""

    samples: Positive | None
    length: Positive


class Metrics(Data, frozen=True):
    """Numbers by name. They may be NaN or infinite."""

    metrics: dict[Name, float]
    epoch: NonNegative | None = None
    samples: NonNegative | None = None


class Text(Data, frozen=True):
    """A text for TensorBoard."""

    name: Name
    text: str


class Image(Data, frozen=True):
    """An image for TensorBoard; its PNG in base64."""

    name: Name
    png: str


class Histogram(Data, frozen=True):
    """How values are distributed: edges of bins, and one count fewer."""

    name: Name
    edges: list[Finite]
    counts: list[NonNegative]

    def __post_init__(self) -> None:
        n_edges, n_counts = len(self.edges), len(self.counts)
        if n_edges != n_counts + 1 or n_counts > MOST_COUNTS or sorted(self.edges) != self.edges:
            raise RecordError(
                f"histogram {self.name!r:.80} has {n_edges} edges and {n_counts} counts: give edges in rising order, "
                f"one more than counts, and at most {MOST_COUNTS} counts"
            )


METADATA = ".metadata"
"""The only hidden file that ranks send: torch's description of a checkpoint in several files."""


class Checkpoint(Struct, frozen=True):
    """What the manifest says of a checkpoint.

    Args:
        parts: of a checkpoint in a folder: the names of its parts, each with the rank that sends it. One of its ranks
            says that, with its own part; the checkpoint is complete when all of them have arrived.
        number: of the save in its attempt: a step may be saved again.
    """

    step: Count
    epoch: NonNegative | None = None
    samples: NonNegative | None = None
    metrics: dict[Name, float] = {}
    best: bool = False
    parts: dict[Name, Rank] = {}
    number: Count = 0


class File(Data, frozen=True):
    """A file: its path inside the run directory, and its content in base64, or its path in the outbox there."""

    path: Name
    size: Count
    sha256: str
    inline: str | None = None
    source: str | None = None
    checkpoint: Checkpoint | None = None

    def __post_init__(self) -> None:
        check_path(self.path)


class Log(Data, frozen=True):
    """What the rank wrote to its stdout and stderr."""

    text: str


class Notice(Data, frozen=True):
    """A warning for the user: one sentence."""

    text: str


class Stack(Data, frozen=True):
    """The Python stacks of the rank's threads, sent on request."""

    text: str


class Preempted(Data, frozen=True):
    """The rank's worker is being shut down."""


class End(Data, frozen=True):
    """How the rank ended: with a value, because it was stopped, or by a failure; and where it was then."""

    value: File | None = None
    stopped: bool = False
    failure: Failure | None = None
    step: Count = 0
    phase: Phase = "end"

    def __post_init__(self) -> None:
        if (self.value is not None) + self.stopped + (self.failure is not None) != 1:
            raise ValueError("an end has a value, was stopped, or failed")


AnyData = (
    Up | Beat | Start | RolledBack | Rows | Metrics | Text | Image | Histogram | File | Log | Notice | Stack | Preempted
    | End
)  # fmt: skip


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a rank.

    Args:
        data: what it says.
        rank: the rank that sent it.
        step: optimizer steps done; None where the record belongs to no step.
        time_s: seconds since 1970, on the rank's clock.
        attempt: number of the gang's attempt, from 0.
    """

    data: AnyData
    rank: Rank = 0
    step: Count | None = None
    time_s: Time = 0.0
    attempt: Count = 0

    @property
    def kind(self) -> str:
        return str(self.data.__struct_config__.tag)

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.data.checkpoint if isinstance(self.data, File) else None

    def check(self) -> None:
        """Refuse what the client would refuse, where it was given."""
        try:
            convert(to_builtins(self, enc_hook=_json_value), type(self))
        except ValueError as error:
            raise RecordError(
                f"results.{self.kind}: {error}: give names and texts that are str, and no empty names"
            ) from None

    def encode(self) -> bytes:
        """Encode as one line of JSON, without the newline. `NaN` is in it: msgspec's own JSON would make it null."""
        return json.dumps(to_builtins(self, enc_hook=_json_value), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, line: bytes | str) -> Record:
        """Read one line of JSON. It comes from a rank, so all of it is checked."""
        found: Any = None
        try:
            found = json.loads(line)
            return convert(found, cls)
        except (ValueError, RecursionError) as error:
            rank = found.get("rank") if isinstance(found, dict) else None
            given = "not a record" if rank is None else f"rank {rank!a:.20} sent a malformed record"
            raise RecordError(f"{given}: {line[:200]!r} ({str(error)[:200]})") from None


def begins(line: bytes, kind: type[Data]) -> bool:
    return line.startswith(b'{"data":{"kind":"%s"' % str(kind.__struct_config__.tag).encode())


def check_path(path: str) -> PurePosixPath:
    """Return `path` if it stays inside the run directory, is not hidden, and has no unusual characters."""
    pure = PurePosixPath(path if isinstance(path, str) else "")
    hidden = [part for part in pure.parts if part.startswith(".") and part != METADATA]
    is_inside = bool(pure.parts) and not pure.is_absolute() and not hidden
    if not is_inside or not path.isprintable() or any(char in path for char in "\\=,"):
        raise RecordError(
            f"path {path!r} is not allowed: give a relative path inside the run directory as a string, without "
            "'..', hidden parts, '=', ',', backslashes or unprintable characters, for example 'samples/epoch-3.txt'"
        )
    return pure


def check_submitted(path: str, rank: int) -> PurePosixPath:
    """Return the path of a file that a user's code submits, if it is in a folder of its own."""
    pure = check_path(path)
    # On some file systems, Checkpoints and checkpoints are the same name.
    if len(pure.parts) < 2 or pure.parts[0].casefold() in RESERVED:
        raise RecordError(
            f"rank {rank} submitted {path!r}: give a folder of its own, 'samples/a.txt', and none of "
            f"{', '.join(RESERVED)}"
        )
    return pure


def _json_value(value: Any) -> Any:
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element
            return value.item()
    if isinstance(value, Path):
        return str(value)
    raise RecordError(f"a record takes plain values, got {type(value).__name__}: {value!r:.80}")


prepare(Record)
