"""The commands for shard indexes: python -m ddp_hydra.compat.wids create | info | sample | update."""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddp_hydra.compat.wids import ShardListDataset
from ddp_hydra.data.shards.index import read_index
from ddp_hydra.data.shards.write import write_index
from ddp_hydra.data.wids import WidsShards
from ddp_hydra.errors import DdpHydraError
from ddp_hydra.storage import bare_url
from ddp_hydra.storage.files import write_atomic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: done; 1: failed, with the reason on stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m ddp_hydra.compat.wids", description="Work with shard indexes.")
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="write the index of tar files")
    create.add_argument("files", nargs="+", help="paths or URLs, with {000..009}; - reads them from stdin")
    create.add_argument("--output", "-o", default="shardindex.json", help="path of the index (%(default)s)")
    create.set_defaults(run=_create)
    update = commands.add_parser("update", help="change an index")
    update.add_argument("filename")
    where = update.add_mutually_exclusive_group()
    where.add_argument("--dir", "-d", help="folder or URL to put before the shards' names")
    where.add_argument("--nodir", "-D", action="store_true", help="leave the names only")
    where.add_argument("--rebase", "-B", action="store_true", help="name the folder of all shards as the base")
    update.set_defaults(run=_update)
    for command in (create, update):
        command.add_argument("--name", "-n", help="of the data set")
        command.add_argument("--base", "-b", help="folder or URL of the shards")
        command.add_argument("--info", "-i", help="a file with a description" if command is create else "a description")
    info = commands.add_parser("info", help="describe indexes")
    info.add_argument("filenames", nargs="+")
    info.add_argument("--table", "-t", action="store_true", help="a line for each, separated by tabs")
    info.set_defaults(run=_info)
    sample = commands.add_parser("sample", help="show a sample")
    sample.add_argument("filename")
    sample.add_argument("index", type=int, nargs="?", default=0)
    sample.add_argument("--raw", "-r", action="store_true", help="show the bytes")
    sample.add_argument("--cat", "-c", metavar="FIELD", help="write the bytes of a field, e.g. .txt, to stdout")
    sample.add_argument("--width", "-w", type=int, default=250, help="of a line")
    sample.set_defaults(run=_sample)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (ValueError, OSError, LookupError, DdpHydraError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def expanded(pattern: str) -> list[str]:
    """Return the paths that a pattern with {000..009} or {a,b} stands for."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    words = found[1].split(",")
    if len(words) == 1:
        ends = re.fullmatch(r"(\d+)\.\.(\d+)", words[0])
        if ends is None:
            raise ValueError(f"{pattern} has {found[0]}, and must have {{000..009}} or {{a,b}}")
        width = len(ends[1]) if ends[1].startswith("0") else 0
        words = [f"{number:0{width}}" for number in range(int(ends[1]), int(ends[2]) + 1)]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [path for word in words for path in expanded(f"{head}{word}{tail}")]


def _create(given: argparse.Namespace) -> None:
    named = [line.strip() for line in sys.stdin if line.strip()] if given.files == ["-"] else given.files
    files = sorted(path for pattern in named for path in expanded(pattern))
    name = given.name if given.name is not None else Path(given.output).stem
    info = given.info and Path(given.info).read_text()
    report = partial(print, flush=True)
    write_index(files, given.output, name=name, base=given.base, info=info, report=report)


def _update(given: argparse.Namespace) -> None:
    path = Path(given.filename)
    read_index(str(path))  # says what is wrong with it
    index = json.loads(path.read_text())
    more = {"name": given.name, "base": given.base, "info": given.info}
    index |= {key: value for key, value in more.items() if value is not None}
    shards = index.get("shardlist", [])
    if given.rebase:
        folders = {shard["url"].rpartition("/")[0] for shard in shards}
        if len(folders) != 1:
            raise ValueError(f"the shards of {path} lie in several folders: {', '.join(sorted(folders))}")
        index["base"] = folders.pop() or str(path.parent.absolute())
    if given.dir or given.nodir or given.rebase:
        for shard in shards:
            shard["url"] = posixpath.join(given.dir or "", shard["url"].rpartition("/")[2])
    index.setdefault("name", path.stem)
    write_atomic(path, (json.dumps(index, indent=2) + "\n").encode())


def _info(given: argparse.Namespace) -> None:
    if given.table:
        print("file", "name", "nbytes", "nsamples", "nshards", "last", sep="\t")  # noqa: T201
    for filename in given.filenames:
        index = read_index(filename)
        samples = sum(shard.n_samples for shard in index.shards)
        n_bytes = sum(shard.size or 0 for shard in index.shards)
        first, last = (bare_url(index.shards[end].url) for end in (0, -1))
        if given.table:
            print(filename, index.name, n_bytes, samples, len(index.shards), last, sep="\t")  # noqa: T201
            continue
        lines = {
            "index": filename, "name": index.name, "info": index.info, "shards": f"{len(index.shards):,}",
            "samples": f"{samples:,}", "bytes": f"{n_bytes:,}", "first shard": first, "last shard": last,
        }  # fmt: skip
        for title, value in lines.items():
            print(f"{title:>12}: {value}")  # noqa: T201


def _sample(given: argparse.Namespace) -> None:
    if given.cat is not None:
        fields = WidsShards(given.filename).fields(given.index)
        if given.cat not in fields:
            raise LookupError(f"the sample has no field {given.cat}, only {', '.join(fields)}")
        sys.stdout.buffer.write(fields[given.cat])
        return
    sample = WidsShards(given.filename)[given.index] if given.raw else ShardListDataset(given.filename)[given.index]
    width = max(map(len, sample))
    for name, value in sorted(sample.items()):
        print(name.ljust(width), repr(value)[: max(10, given.width - width - 1)])  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
