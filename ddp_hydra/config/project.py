"""Find the project space (conf, models, data), pack it under its content hash, and unpack it on a worker.

Ranks are fresh processes that put the unpacked folder first on their path. So they run the code that was there when the
config was composed, also on machines without the checkout, and after an edit.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ddp_hydra.errors import ConfigError

PACKAGES = ("models", "data")
FOLDERS = (*PACKAGES, "conf")
SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml", ".txt")
MAX_BYTES = 10 * 2**20


@dataclass(frozen=True)
class Project:
    """Hold a packed project space.

    Args:
        sha256: hash of the names and contents of its files; equal content gives an equal archive.
        archive: the zip file.
    """

    sha256: str
    archive: bytes

    def unpack(self, folder: Path) -> Path:
        """Unpack under `folder`, unless that is done already; return the folder to import from."""
        target = folder / f"project-{self.sha256[:16]}"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=target.name, dir=folder))
            try:
                with zipfile.ZipFile(io.BytesIO(self.archive)) as archive:
                    archive.extractall(draft)
            except BaseException:  # e.g. a full disk
                shutil.rmtree(draft, ignore_errors=True)
                raise
            try:
                draft.rename(target)
            except OSError:  # another rank of this worker was faster
                shutil.rmtree(draft)
        return target


def find(start: Path | None = None) -> Path:
    """Return the folder that holds `conf/config.yaml`: the current one, or `DDP_HYDRA_PROJECT`.

    Raises:
        ConfigError: there is none.
    """
    folder = typed_in() / (os.environ.get("DDP_HYDRA_PROJECT") or start or "")
    if not (folder / "conf" / "config.yaml").is_file():
        raise ConfigError(
            f"no project here: {folder} has no conf/config.yaml. Go to the checkout (the folder with conf/, models/ "
            "and data/), or name it in DDP_HYDRA_PROJECT"
        )
    return folder


def typed_in() -> Path:
    """Return the folder that the command was typed in: with `hydra.job.chdir=true`, jobs run in their run directory."""
    module = sys.modules.get("hydra.core.hydra_config")  # on a worker, it may not be imported
    if module is not None and module.HydraConfig.initialized() and module.HydraConfig.get().job.chdir:
        return Path(module.HydraConfig.get().runtime.cwd)
    return Path.cwd()


def pack(root: Path) -> Project:
    """Pack the code and configuration below `root`.

    Raises:
        ConfigError: it is too large to be code.
    """
    files = sorted(
        path
        for name in FOLDERS
        for path in (root / name).rglob("*")
        if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts
    )
    total = sum(path.stat().st_size for path in files)
    if total > MAX_BYTES:
        largest = max(files, key=lambda path: path.stat().st_size).relative_to(root)
        raise ConfigError(
            f"the project space {root} has {total / 2**20:.0f} MiB of {', '.join(SUFFIXES)} files, more than the "
            f"{MAX_BYTES // 2**20} MiB that are shipped with each job; the largest is {largest}: keep data sets "
            "elsewhere"
        )
    contents = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
    for name in PACKAGES:
        # Without it, a regular package of that name anywhere on a worker's path would win over the project's.
        contents.setdefault(f"{name}/__init__.py", b"")
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return Project(digest.hexdigest(), buffer.getvalue())
