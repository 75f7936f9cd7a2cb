from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_hydra.dispatch import file_transfer
from ddp_hydra.rank import outbox
from ddp_hydra.record import File

NOBODY = 65534


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """This process cannot look into the folder."""
    folder.chmod(0)
    me = os.geteuid()
    if me == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)
        folder.chmod(0o700)


def test_a_worker_of_another_user_on_this_host_is_asked_for_its_files(tmp_path):
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "1").write_bytes(b"abc")
    calls = []
    with closed(folder):
        file_transfer.drop(folder / "1", File("a", 3, ""), lambda *args: calls.append(args))
    assert calls == [(outbox.remove, "1")]
    assert (folder / "1").exists()
