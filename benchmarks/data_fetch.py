"""Our client of object stores: objects fetched in threads and thrown away. It imports no torch, as the bare client."""

from __future__ import annotations

import gc
import itertools

from benchmarks.peers import data_common as common
from ddp_hydra.storage import Bucket


def main() -> None:
    """Fetch with each number of threads from each endpoint."""
    arguments = common.arguments()
    gc.freeze()  # as in a rank
    results = []
    for threads, endpoint in itertools.product(arguments.threads, arguments.endpoints):
        bucket = Bucket("photos", endpoint_url=endpoint, anon=True)
        keys = sorted(key for key, _ in bucket.objects("train"))
        chosen = [keys[index] for index in common.shuffled(arguments.images[0], arguments.seed)] * arguments.passes

        def fetch(key: str, bucket: Bucket = bucket) -> int:
            return len(bucket.get(key))

        results.append(common.in_threads(fetch, chosen, threads))
        bucket.close()
    common.say(results)


if __name__ == "__main__":
    main()
