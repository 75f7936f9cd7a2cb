"""Asks TensorBoard's plugin for all runs of a folder, and once stdin is closed, for what has changed.

Print a line of JSON for each answer: how long it took, and how many rows it has.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

from werkzeug.test import Client

from ddp_hydra.tensorboard.plugin import RunsPlugin


def main(logdir: str) -> None:
    """Ask twice; the second time when the plugin looks at the runs again."""
    app = RunsPlugin(SimpleNamespace(logdir=logdir, flags=None)).get_plugin_apps()["/runs"]
    query: dict[str, object] = {}
    for turn in range(2):
        begin = time.perf_counter()
        found = json.loads(Client(app).get("/runs", query_string=query).data)
        print(json.dumps({"took_s": time.perf_counter() - begin, "rows": len(found["rows"])}), flush=True)
        query = {"instance": found["instance"], "since": found["version"]}
        if turn == 0:
            sys.stdin.read()
            time.sleep(4 * (time.perf_counter() - begin) + 1.0)


if __name__ == "__main__":
    main(sys.argv[1])
