"""The folders of ranks on a host that others use, too."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import outbox

NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def worker(tmp_path) -> SimpleNamespace:
    """A worker whose folder was made under a lax umask, as Dask makes it."""
    folder = tmp_path / "dask-scratch-space" / "worker-1"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o777)
    return SimpleNamespace(local_directory=str(folder))


def test_what_ranks_import_and_read_is_closed_to_other_users(worker):
    outbox.folder(worker, "gang", 0)
    assert mode(Path(worker.local_directory)) == 0o700
    assert mode(Path(worker.local_directory).parent) == 0o1777  # their workers may have folders there, as in /tmp


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders away, which only root can")
@pytest.mark.parametrize("which", ["worker-1", "dask-scratch-space"])
def test_a_folder_that_somebody_else_has_made_is_refused_with_what_to_give(worker, which):
    """As real as one user can have it: root looks at folders that it has given to nobody."""
    folder = Path(worker.local_directory)
    other = folder if which == "worker-1" else folder.parent
    os.chown(other, NOBODY, NOBODY)
    said = f"{other} belongs to user id {NOBODY}, not 0.* Give .*DASK_TEMPORARY_DIRECTORY"
    with pytest.raises(ConfigError, match=said):
        outbox.folder(worker, "gang", 0)
    for act in (
        lambda: outbox.write("gang", 0, "file", b"", True, worker),
        lambda: outbox.read("gang", 0, "file", 0, worker),
    ):
        with pytest.raises(ConfigError):
            act()


@pytest.mark.skipif(os.getuid() == 0, reason="everything is root's")
def test_a_scratch_folder_of_somebody_else_is_refused_also_where_it_is_roots():
    with pytest.raises(ConfigError):
        outbox.secure("/usr")


def test_a_link_is_judged_by_where_it_leads(worker, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(worker.local_directory)
    outbox.secure(str(link))
    assert mode(Path(worker.local_directory)) == 0o700
