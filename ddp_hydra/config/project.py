"""Finds the project space (conf, models, data), packs it under its content hash, and unpacks it on a worker.

A project space has layers: the project's own folder, then the starter that is installed with ddp_hydra. A file of the
project wins over one of the starter.

Ranks are fresh processes that put the unpacked folder first on their path. So they run the code that was there when the
config was composed, also on machines without the checkout, and after an edit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import scratch_folder

PACKAGES = ("models", "data")
FOLDERS = (*PACKAGES, "conf")
SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml", ".txt")
MAX_BYTES = 10 * 2**20
ARCHIVE = "project.zip"
"""In a run directory: the project space that the run was made with."""
VARIABLE = "DDP_HYDRA_PROJECT"
"""Environment variable that names the project's folder."""


@dataclass(frozen=True)
class Project:
    """Holds a packed project space.

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
            with tempfile.TemporaryDirectory(prefix=target.name, dir=folder) as draft:
                unpacked = Path(draft, "project")
                unpacked.mkdir(0o700)  # other users of the host may not read it
                with zipfile.ZipFile(io.BytesIO(self.archive)) as archive:
                    archive.extractall(unpacked)
                with contextlib.suppress(OSError):  # another rank of this worker was faster
                    unpacked.rename(target)
        return target


def starter() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "starter"
    return installed if installed.is_dir() else package.parent


def find() -> Path:
    """Return the project's folder: `DDP_HYDRA_PROJECT`, or the current folder if it holds a project, or the starter."""
    named = os.environ.get(VARIABLE)
    folder = typed_in() / (named or "")
    if is_project(folder):
        return folder
    if named:
        raise ConfigError(f"{VARIABLE}={named}: {folder} holds no project, with conf/, models/ or data/: unset it")
    return starter()


def is_project(folder: Path) -> bool:
    conf, has_code = folder / "conf", any(next((folder / name).glob("*.py"), None) for name in PACKAGES)
    if conf.is_dir() and (has_code or conf.stat().st_uid == os.getuid()):  # else it is another program's
        os.listdir(conf)  # noqa: PTH208, pathlib and Hydra take one that may not be read for an empty one
    return has_code or bool(next(conf.glob("**/*.yaml"), None))


def layers() -> tuple[Path, ...]:
    root = find()
    return (root,) if root.samefile(starter()) else (root, starter())


def typed_in() -> Path:
    """Return the folder that the command was typed in: with `hydra.job.chdir=true`, jobs run in their run directory."""
    module = sys.modules.get("hydra.core.hydra_config")  # on a worker, it may not be imported
    if module is not None and module.HydraConfig.initialized() and module.HydraConfig.get().job.chdir:
        return Path(module.HydraConfig.get().runtime.cwd)
    return Path.cwd()


def pack(*roots: Path) -> Project:
    files: dict[str, Path] = {}
    try:
        for root in reversed(roots):
            files |= {path.relative_to(root).as_posix(): path for path in _files(root)}
        stats = {name: path.stat() for name, path in files.items()}
        if (total := sum(stat.st_size for stat in stats.values())) > MAX_BYTES:
            largest = max(stats, key=lambda name: stats[name].st_size)
            raise ConfigError(
                f"the project space {roots[0]} has {total / 2**20:.0f} MiB of {', '.join(SUFFIXES)} files, and "
                f"{MAX_BYTES // 2**20} MiB can be shipped with a job; the largest is {largest}: keep data sets outside"
            )
        stamps = ((stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) for stat in stats.values())
        return _pack(tuple(files.items()), tuple(stamps))
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: the files of {roots[0]} travel with each job: let its user read it, "
            "or move it out of there"
        ) from None


@functools.lru_cache(maxsize=2)
def _pack(files: tuple[tuple[str, Path], ...], stamps: tuple[tuple[int, ...], ...]) -> Project:
    """Pack files. The jobs of a sweep, which are forks of one process, pack the same ones, with the same stamps."""
    contents = {name: path.read_bytes() for name, path in files}
    for name in PACKAGES:
        # Without it, a regular package of that name anywhere on a worker's path would win over the project's.
        contents.setdefault(f"{name}/__init__.py", b"")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return Project(_hash(contents), buffer.getvalue())


def texts(project: Project) -> Iterator[str]:
    """Yield the content of each file of a project space that holds settings, not code."""
    with zipfile.ZipFile(io.BytesIO(project.archive)) as archive:
        for name in archive.namelist():
            if not name.endswith((".py", ".txt")):
                yield archive.read(name).decode(errors="replace")


def packed(archive: bytes) -> Project:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            if sum(info.file_size for info in opened.infolist()) > 2 * MAX_BYTES:
                raise ValueError("it is too large")
            return Project(_hash({info.filename: opened.read(info) for info in opened.infolist()}), archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"it is not an archive of a project space ({error})") from None


def _hash(contents: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for name in FOLDERS:
        yield from _inside(root / name, SUFFIXES, (root.resolve(),))


def _inside(folder: Path, suffixes: Collection[str], around: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files of a folder, and the code behind its links. A link may lead to a data set, which stays.

    Args:
        around: the real folders that led here. A link to one of them, or to a folder around it, has no end.
    """
    for place, names_of_folders, names in os.walk(folder):  # it asks nothing of each file
        here = Path(place)
        names_of_folders[:] = [name for name in names_of_folders if name != "__pycache__"]
        yield from (here / name for name in names if Path(name).suffix in suffixes and (here / name).is_file())
        for link in filter(Path.is_symlink, (here / name for name in names_of_folders)):
            target, led_here = link.resolve(), (*around, here.resolve())
            if next(link.glob("*.py"), None) and not any(one.is_relative_to(target) for one in led_here):
                yield from _inside(link, (".py",), led_here)


def make_importable(roots: Sequence[Path]) -> Callable[[], None]:
    """Let this process import `models` and `data` of a project space, from the files where they are.

    Args:
        roots: its layers. With one, it goes first on the path. With more, a temporary folder with packages that span
            the layers goes there, because processes that this one spawns get its path, too.

    Returns:
        What removes that folder, where this process ends without its exit handlers.
    """
    folder, remove = (roots[0], lambda: None) if len(roots) == 1 else _spanning_folder(tuple(roots))
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    return remove


@functools.cache
def _spanning_folder(roots: tuple[Path, ...]) -> tuple[Path, Callable[[], None]]:
    """Return a folder, removed when this process ends, with packages that span the layers; and what removes it."""
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder("ddp_hydra-import-", tempfile.gettempdir()))
    atexit.register(stack.close)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(_spanning_package([root / name for root in roots]))
    return folder, stack.close


def _spanning_package(folders: Sequence[Path]) -> str:
    """Return the source of an `__init__.py` whose modules are in several folders, and which runs the first's own."""
    source = f"__path__ = {[str(folder) for folder in folders]!r}\n"
    own = next((folder / "__init__.py" for folder in folders if (folder / "__init__.py").is_file()), None)
    if own is not None:
        source += f"__file__ = {str(own)!r}\n"
        source += "with open(__file__, 'rb') as _file:\n    exec(compile(_file.read(), __file__, 'exec'))\n"
    return source
