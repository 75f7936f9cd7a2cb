"""Records the moving pictures of the documentation: `python docs/casts/record.py [name ...]`, from the checkout.

Each is a real run of commands in a terminal, in an empty folder. Waits are shortened to `PAUSE_S`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import ptyprocess
import pyte
from svg import Frame, Row, Span, draw

HERE = Path(__file__).resolve().parent
PAUSE_S, BETWEEN_S, HOLD_S = 1.2, 0.1, 4.0
"""The longest wait that is shown, the shortest time between two frames, and how long the last frame stays."""
COLUMNS = 116
PROMPT = "\x1b[32m$\x1b[0m "


@dataclass(frozen=True)
class Cast:
    """Describe a recording.

    Args:
        title: what it shows, for readers that can't see it.
        lines: height of the terminal.
        script: for bash. `show` prints words as if they were typed; `type` runs them, too.
    """

    title: str
    lines: int
    script: str


FUNCTIONS = f"""
show() {{ printf '{PROMPT}%s\\n' "$*"; sleep 0.8; }}
type() {{ show "$@"; eval "$@"; }}
"""
CASTS = {
    "demo": Cast(
        "Training on handwritten digits from an embedded S3 server, on two ranks",
        15,
        "type ddp-hydra experiment=digits trainer.epochs=3",
    ),
    "kill": Cast(
        "A rank is killed, and training goes on from the last checkpoint",
        20,
        """
        words="data=digits model=mlp data.batch_size=16 optimizer.lr=0.1 trainer.epochs=12"
        words="$words trainer.checkpoint_every_steps=10"
        show ddp-hydra $words
        ddp-hydra $words &
        until grep -q '"val/loss"' outputs/*/*/metrics.jsonl 2>/dev/null; do sleep 0.1; done
        sleep 0.3
        victim=$(grep -o 'pid [0-9]*' outputs/*/*/logs/rank-1.log | head -1 | cut -d' ' -f2)
        show kill -9 $victim
        kill -9 $victim || exit 1
        wait
        sleep 0.5
        """,
    ),
    "sweep": Cast(
        "A sweep over learning rate and batch size, two jobs at once on one warm cluster",
        14,
        "type ddp-hydra -m data=digits model=mlp optimizer.lr=0.01,0.1,0.3 data.batch_size=32,64 trainer.epochs=4 "
        "cluster.n_workers=4 dispatch.ranks=2",
    ),
    "detach": Cast(
        "A run that goes on without its command, and a command that shows it again",
        22,
        """
        trap 'kill $(jobs -p)' EXIT
        dask scheduler --host 127.0.0.1 --port 0 --no-dashboard --scheduler-file scheduler.json >log 2>&1 &
        for worker in 1 2; do
            dask worker --scheduler-file scheduler.json --nthreads 1 --no-dashboard --host 127.0.0.1 >>log 2>&1 &
        done
        type 'ddp-hydra cluster=remote cluster.scheduler_file=scheduler.json data=digits model=mlp' \
            'trainer.epochs=2000 results.handler=cluster results.root=$PWD/shared detach=true'
        until grep -q val/loss shared/*/*/metrics.jsonl 2>/dev/null; do sleep 0.1; done
        show 'ddp-hydra attach run=$(ls -d outputs/*/*)'
        timeout --foreground -s INT 9 ddp-hydra attach run=$(ls -d outputs/*/*)  # as Ctrl-C would
        type 'ddp-hydra attach run=$(ls -d outputs/*/*) stop=true' || true  # as interrupted
        """,
    ),
}


def main(names: list[str]) -> None:
    """Record some of the casts, or all."""
    for name in names or CASTS:
        cast = CASTS[name]
        with tempfile.TemporaryDirectory(prefix="cast-") as folder:
            frames = list(calm(record(cast, Path(folder))))
        picture = draw(frames, COLUMNS, cast.lines, HOLD_S, cast.title)
        (HERE / f"{name}.svg").write_text(picture)
        print(f"{name}.svg: {len(frames)} frames, {len(picture) // 1024} KiB")  # noqa: T201


def record(cast: Cast, folder: Path) -> Iterator[Frame]:
    """Run a script in a terminal, and yield what it shows whenever that changes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
        "PYTHONWARNINGS": "ignore",
    }
    process = ptyprocess.PtyProcess.spawn(
        ["bash", "--norc", "-c", f"{FUNCTIONS}\n{cast.script}"],
        cwd=str(folder),
        env=environment,
        dimensions=(cast.lines, COLUMNS),
    )
    screen = pyte.Screen(COLUMNS, cast.lines)
    stream, begin = pyte.ByteStream(screen), time.monotonic()
    while True:
        try:
            stream.feed(process.read(65536))
        except EOFError:
            break
        yield Frame(time.monotonic() - begin, rows(screen))
    if process.wait():
        sys.exit(f"the script failed:\n{chr(10).join(screen.display)}")


def calm(frames: Iterator[Frame]) -> Iterator[Frame]:
    """Yield frames that differ, no two of them too close, without long waits between them."""
    held: Frame | None = None
    now_s = 0.0
    for frame in frames:
        if held is not None and frame.at_s - held.at_s >= BETWEEN_S and frame.rows != held.rows:
            yield Frame(now_s, held.rows)
            now_s += min(frame.at_s - held.at_s, PAUSE_S)
            held = frame
        else:
            held = Frame(held.at_s if held else frame.at_s, frame.rows)
    if held is not None:
        yield Frame(now_s, held.rows)


def rows(screen: pyte.Screen) -> tuple[Row, ...]:
    """Return the rows of a screen."""
    found = []
    for line in range(screen.lines):
        cells = [(column, screen.buffer[line][column]) for column in range(screen.columns)]
        spans = []
        for (colour, bold), part in groupby(cells, lambda cell: (cell[1].fg, cell[1].bold)):
            some = list(part)
            text = "".join(cell.data for _, cell in some)
            if text.strip():
                spans.append(Span(some[0][0], text.rstrip(), colour, bold))
        found.append(tuple(spans))
    return tuple(found)


if __name__ == "__main__":
    main(sys.argv[1:])
