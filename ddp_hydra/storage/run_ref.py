"""What `resume=` and `run=` name: a run directory, its `checkpoints`, a checkpoint file, or the URL of a run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import results_root, stored_checkpoints
from ddp_hydra.storage.manifest import FOLDER, find_checkpoint
from ddp_hydra.storage.results_root import ResultsFolder


@dataclass(frozen=True)
class RunRef:
    """A run, as a user names it.

    Args:
        place: path or URL of what is named; of a run directory that only points to its results, their URL.
    """

    place: str

    @classmethod
    def of(cls, given: str | Path) -> RunRef:
        """Read what a user has typed; of a run directory that only points to its results, return these.

        Raises:
            ConfigError: it is neither a path nor a URL that is known.
        """
        own = cls.own(given)
        if not own.is_stored:
            with suppress(OSError):
                return cls((Path(own.place) / results_root.POINTER).read_text().strip())
        return own

    @classmethod
    def own(cls, given: str | Path) -> RunRef:
        """Read what a user has typed, also where it is a run directory that only points to its results.

        Raises:
            ConfigError: it is neither a path nor a URL that is known.
        """
        return cls(results_root.plain_path(str(given)))

    @property
    def is_stored(self) -> bool:
        """Return whether it is in a store, not in a folder of this machine."""
        return results_root.is_url(self.place)

    @property
    def folder(self) -> str:
        """Return path or URL of the run's own folder, whatever is named in it."""
        if self.is_stored:
            return self.place.rstrip("/").removesuffix(f"/{FOLDER}")
        path = Path(self.place)
        if path.is_file() or (path.suffix == ".pt" and not path.is_dir()):
            path = path.parent
        is_inside = path.absolute().name == FOLDER and not (path / ".hydra").is_dir()
        return str(path.absolute().parent if is_inside else path)

    def store(self, timeout_s: float = 60.0) -> ResultsFolder:
        """Return the run's own folder, to be read and written wherever it is. No request is sent yet."""
        place = self.folder if self.is_stored else str(Path(self.folder).absolute())
        return results_root.open_folder(place, timeout_s)

    def read(self, name: str, timeout_s: float = 60.0) -> bytes:
        """Return the content of a small file of the run.

        Raises:
            FileNotFoundError: there is none.
            ConnectionError: the store does not answer.
        """
        if self.is_stored:
            return self.store(timeout_s).get(name)
        return (Path(self.folder) / name).read_bytes()

    def checkpoint(self, which: str, download: Path, retry_s: float = 60.0) -> Path:
        """Return the absolute path of a checkpoint, downloaded if the run is in a store.

        Args:
            which: the checkpoint of a run, "best" or "last".
            download: the folder for a download; made if it is missing.
            retry_s: how long to retry while the store does not answer.

        Raises:
            CheckpointError: there is no run, or no complete checkpoint.
            ConfigError: `which` is neither.
        """
        if which not in ("best", "last"):
            raise ConfigError(f"which={which}: give best or last")
        name = cast('Literal["last", "best"]', which)
        if not self.is_stored:
            return find_checkpoint(self.place, name).absolute()
        download.mkdir(parents=True, exist_ok=True)
        return stored_checkpoints.fetch_checkpoint(self.place, download, name, retry_s=retry_s).absolute()
