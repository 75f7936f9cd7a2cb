"""The commands that write tar shards from an image folder, and the index of existing shards.

python -m ddp_hydra.data.shards make SOURCE OUT [--shard-mb 128] [--seed 0] [--name NAME] [--classes-from FROM]
python -m ddp_hydra.data.shards index TAR... --out index.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from ddp_hydra.data.shards.write import write_index, write_shards
from ddp_hydra.storage import Access


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: done; 1: failed, with the reason on stderr; 130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ddp_hydra.data.shards", description="Write tar shards for data.index."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the images of a folder into shards, in random order")
    making.add_argument("source", metavar="SOURCE", help="folder or s3://bucket/prefix with <class>/<file> images")
    making.add_argument("out", metavar="OUT", help="folder or s3://bucket/prefix for the shards and their index.json")
    making.add_argument("--shard-mb", type=float, default=128, help="size of a shard, MiB (%(default)s)")
    making.add_argument("--seed", type=int, default=0, help="of the order (%(default)s)")
    making.add_argument(
        "--classes-from",
        metavar="FROM",
        help="folder or index.json whose classes are numbered, such as the training's; default: SOURCE",
    )
    indexing = commands.add_parser("index", help="write the index of existing shards")
    indexing.add_argument("tars", metavar="TAR", nargs="+", help="paths or URLs, in order")
    indexing.add_argument("--out", required=True, help="path of the index to write")
    for command in (making, indexing):
        command.add_argument("--name", help="of the data set")
        command.add_argument("--endpoint-url", help="of s3:// URLs; default: what the environment says, else AWS")
        command.add_argument("--region", help="of s3:// URLs")
        command.add_argument("--anon", action="store_true", help="read s3:// URLs without credentials")
    given = parser.parse_args(arguments)
    report = partial(print, flush=True)
    access = Access(given.endpoint_url, given.region, given.anon, setting="SOURCE")
    try:
        if given.command == "make":
            options = {"shard_mb": given.shard_mb, "seed": given.seed, "classes_from": given.classes_from}
            index = write_shards(given.source, given.out, name=given.name, access=access, report=report, **options)
        else:
            index = write_index(given.tars, given.out, name=given.name, access=access, report=report)
    except (ValueError, OSError) as error:
        print(f"ddp_hydra.data.shards: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("ddp_hydra.data.shards: interrupted; there is no index yet", file=sys.stderr)  # noqa: T201
        return 130
    total = sum(shard["nsamples"] for shard in index["shardlist"])
    n_shards = len(index["shardlist"])
    report(f"{total:,} samples in {n_shards:,} shard{'s' * (n_shards != 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
