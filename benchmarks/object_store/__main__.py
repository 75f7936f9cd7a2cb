"""Runs the server until Ctrl-C, to measure parts by hand: `python -m benchmarks.object_store`."""

from __future__ import annotations

import contextlib
import threading

from benchmarks.object_store import corpus, link, server


def main() -> None:
    """Serve, and say where."""
    root = corpus.make(corpus.FOLDER)
    with server.serve(root, corpus.FOLDER / "server-by-hand") as store, link.to(store.late) as slow:
        print(f"without delay:            {store.url(0)}")
        print(f"first byte after {server.LATE_MS} ms:   {store.url(server.LATE_MS)}")
        print(f"and {link.GBIT_PER_S:g} Gbit/s for all:    {slow}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
