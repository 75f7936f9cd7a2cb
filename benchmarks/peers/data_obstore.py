"""Fetch objects with the bare obstore client in threads, and discard them."""

from __future__ import annotations

import itertools

import data_common as common
import obstore
from obstore.store import S3Store


def main() -> None:
    """Fetch with each number of threads from each endpoint."""
    arguments = common.arguments()
    results = []
    for threads, endpoint in itertools.product(arguments.threads, arguments.endpoints):
        store = S3Store(
            "photos", region="us-east-1", endpoint=endpoint, skip_signature=True, client_options={"allow_http": True}
        )
        keys = sorted(item["path"] for chunk in obstore.list(store, "train") for item in chunk)
        chosen = [keys[index] for index in common.shuffled(arguments.images[0], arguments.seed)] * arguments.passes

        def fetch(key: str, store: S3Store = store) -> int:
            return len(obstore.get(store, key).bytes())

        results.append(common.in_threads(fetch, chosen, threads))
    common.say(results)


if __name__ == "__main__":
    main()
