"""Measures what GPUs do, compares it with goals, writes docs/gpu.md: `make gpu-report`; DEVICE=cpu rehearses it."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import commands, report
from benchmarks.gpu import card, page
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import PARTS, Part, measure
from ddp_hydra.rank import environment

WARM_S = 120.0
"""How long a fork server stays for the next job of the report."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> None:
    """Run the parts; print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with small sizes")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", choices=[part.name for part in PARTS], help="run only these"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page there (docs/gpu.md)")
    parser.add_argument("--list", action="store_true", help="list the parts, and end")
    report.add_options(parser, repeats=3)
    parser.set_defaults(repeats=None)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{part.name:15} {part.about}" for part in PARTS))
        return
    arguments.repeats = arguments.repeats or (3 if arguments.device == "cuda" else 1)
    report.check_options(parser, arguments)
    if arguments.device == "cuda" and not environment.gpu_uuids():
        sys.exit("NVIDIA's driver shows no GPU here: type make gpu-report DEVICE=cpu to rehearse the report")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is under way ends as with Ctrl-C
    chosen = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    seen, measured = run(arguments.device, chosen, arguments.repeats)
    is_whole = len(measured) == len(chosen)
    if is_whole or arguments.page:
        write_page(arguments, seen, measured)
    report.finish([line for _, lines in measured for line in lines], arguments)
    if not is_whole:
        sys.exit(INTERRUPTED)


def run(device: str, parts: list[Part], repeats: int) -> tuple[card.Card, list]:
    """Measure parts on a device, in a temporary folder and with a fork server of their own; Ctrl-C ends it early."""
    seen = card.look(device)
    report.progress(f"{seen.name}, {seen.gpus} GPUs, torch {seen.torch_version}")
    with commands.nobody_warm(WARM_S) as variables, tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        bench = Bench(seen, Path(folder), {**variables, "COLUMNS": "200"}, repeats)
        measured: list = []
        try:
            for found in measure(bench, parts):
                measured.append(found)
        except KeyboardInterrupt:
            report.progress(f"interrupted after {len(measured)} of {len(parts)} parts")
        finally:
            stop_server(bench)
        return seen, measured


def stop_server(bench: Bench) -> None:
    """End the fork servers of the report."""
    bench.command([sys.executable, "-m", "ddp_hydra", "warm", "stop"], bench.folder, {})


def write_page(arguments: argparse.Namespace, seen: card.Card, measured: list) -> None:
    """Write the page, unless only some parts were run, or a rehearsal would replace the page of a card."""
    path = arguments.page or (None if arguments.only else page.PAGE)
    if path is None:
        return
    if not arguments.page and not page.may_write(path, seen.gpus > 0):
        report.progress(f"{path.name} stays as a card has measured it; --page {path.name} gives another place")
        return
    command = f"make gpu-report REPORT='--repeats {arguments.repeats}'" if seen.gpus else "make gpu-report DEVICE=cpu"
    path.write_text(page.render(seen, measured, datetime.datetime.now(datetime.UTC).date(), command), encoding="utf-8")


if __name__ == "__main__":
    main()
