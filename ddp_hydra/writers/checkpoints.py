"""Writes checkpoints/: step files, last.pt, best.pt and the manifest; deletes old step files.

The order of the steps makes an interruption at any moment safe: a step file is complete and verified before the
manifest names it, the manifest names it before last.pt and best.pt move to it, and only then are older files deleted.
"""

from __future__ import annotations

from pathlib import Path

from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.record import File, Record, check_path
from ddp_hydra.results import finite
from ddp_hydra.storage.files import link_or_copy, place, remove_parts, replacing, write_atomic, writing
from ddp_hydra.storage.manifest import ALIASES, FOLDER, NAME, STEP_FILE, Entries, read_manifest, write_manifest_text
from ddp_hydra.writers.base import Fetch
from ddp_hydra.writers.receive_file import FileReceiver


class CheckpointWriter:
    """Keeps a run's checkpoints.

    Args:
        run_dir: the job's run directory; a manifest that is there already is continued.
        fetch: copies files that are not inline.
        keep: newest step files to keep, besides those that last.pt and best.pt point to; None keeps all.

    Raises:
        ConfigError: `keep` is less than 1.
        CheckpointError: the manifest that is there already cannot be read.
    """

    def __init__(self, run_dir: Path, fetch: Fetch | None = None, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"checkpoints to keep must be at least 1, or null for all; got {keep}")
        self._run_dir = run_dir
        self._receiver = FileReceiver(fetch)
        self._keep = keep
        self._folder = run_dir / FOLDER
        present = self._folder.is_dir() and not self._folder.is_symlink()
        old = read_manifest(self._folder) if present else {}
        self._entries = {name: entry for name, entry in old.items() if (self._folder / name).is_file()}
        self._outdated: set[str] = set()
        if present:
            with writing(self._folder):
                remove_parts(self._folder)

    def write(self, record: Record) -> None:
        """Receive the checkpoint of a 'file' record that holds one. After an error, the same record may come again.

        Raises:
            RecordError: its name is not that of a step file, it did not arrive whole, or it cannot be written.
        """
        file, checkpoint = record.data, record.checkpoint
        if not isinstance(file, File) or checkpoint is None:
            return
        name = _step_name(file.path, checkpoint.step, record.rank)
        self._receiver.receive(record, place(self._run_dir, f"{FOLDER}/{name}"))
        self._outdated.discard(name)
        # After a rollback, a name may come again; then it is the newest.
        entries = {known: entry for known, entry in self._entries.items() if known != name}
        entries[name] = {
            "size": file.size,
            "sha256": file.sha256.lower(),
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "samples": checkpoint.samples,
            "metrics": finite(checkpoint.metrics),
        }
        self._save(entries)
        for alias in ALIASES if checkpoint.best else ALIASES[:1]:
            self._point(alias, name)
            entries[alias] = entries[name]
        outdated = self._too_old(entries)
        self._save({known: entry for known, entry in entries.items() if known not in outdated})
        self._outdated.update(outdated)
        self._remove_outdated()

    def close(self) -> None:
        """Delete the file that was not received completely."""
        self._receiver.drop()

    def _save(self, entries: Entries) -> None:
        write_atomic(self._folder / NAME, write_manifest_text(entries))
        self._entries = dict(entries)

    def _remove_outdated(self) -> None:
        for name in sorted(self._outdated):
            with writing(self._folder / name):
                (self._folder / name).unlink(missing_ok=True)
            self._outdated.discard(name)

    def _point(self, alias: str, name: str) -> None:
        """Make `alias` the same file as `name`, atomically."""
        target = self._folder / alias
        with writing(target), replacing(target) as part:
            link_or_copy(self._folder / name, part)

    def _too_old(self, entries: Entries) -> list[str]:
        if self._keep is None:
            return []
        named = {entries[alias]["sha256"] for alias in ALIASES if alias in entries}
        steps = [name for name in entries if STEP_FILE.fullmatch(name)]
        return [name for name in steps[: -self._keep] if entries[name]["sha256"] not in named]


def _step_name(path: str, step: int, rank: int) -> str:
    """Return the file name; refuse a path that does not belong to the step."""
    pure = check_path(path)
    match = STEP_FILE.fullmatch(pure.name)
    if pure.parts[:-1] != (FOLDER,) or match is None or match[2] or int(match[1]) != step:
        raise RecordError(
            f"rank {rank} sent a checkpoint of step {step} as {path!r}; it must be called '{FOLDER}/step-{step:06d}.pt'"
        )
    return pure.name
