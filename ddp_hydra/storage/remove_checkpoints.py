"""Remove the checkpoints of a run from a store, when a sweep keeps only those of its best jobs.

The manifest names none of them before the first one is removed, so that nothing ever points to a missing one.
"""

from __future__ import annotations

from functools import partial

from ddp_hydra.storage.fetch_checkpoint import entries_of, folder_of, read_stored_manifest, retried
from ddp_hydra.storage.manifest import ALIASES, NAME, STEP_FILE, Entries, name_in_store, write_manifest_text


def remove_checkpoints(url: str, reason: str, own: Entries | None = None, retry_s: float = 60.0) -> None:
    """Remove the checkpoints of a run that nobody writes from a store.

    Args:
        url: of the run, "s3://bucket/folder" or a path.
        reason: the manifest says it, and so does whoever looks for a checkpoint.
        own: entries of the run's own manifest; the checkpoints of other runs in the same folder stay. None: all that
            are there are its own.
        retry_s: how long to ask again while the store does not answer.

    Raises:
        CheckpointError: there are none, or the store did not answer in time.
        ConfigError: the URL, the bucket or the credentials are wrong, or obstore is not installed.
    """
    remote = folder_of(url)
    entries = entries_of(read_stored_manifest(remote, retry_s), remote.url)
    if own is None:
        ours = {key for key, _ in retried(lambda: list(remote.objects()), retry_s) if STEP_FILE.fullmatch(key)}
    else:
        ours = {name_in_store(name, entry) for name, entry in own.items() if STEP_FILE.fullmatch(name)}
    left = {name: entry for name, entry in entries.items() if STEP_FILE.fullmatch(name) and name not in ours}
    sums = {entry.get("sha256") for entry in left.values()}
    left |= {name: entries[name] for name in ALIASES if name in entries and entries[name].get("sha256") in sums}
    manifest = write_manifest_text(left, removed="" if left else reason)
    retried(partial(remote.put, NAME, manifest), retry_s)
    for key in sorted(ours):
        retried(partial(remote.delete, key), retry_s)
