"""The folder that processes share."""

import os
import threading

import pytest

from data.shards import folder as module
from data.shards.folder import ShardFolder, with_index

NAME = f"{'0' * 32}-a.tar"
OTHER = f"{'1' * 32}-b.tar"
SIZE = 1000


@pytest.mark.timeout(10)
def test_a_shard_that_gets_its_name_while_it_is_counted_is_counted(tmp_path, monkeypatch):
    """The budget would be exceeded: a name is listed, the file has another one when its size is asked for."""
    folder = ShardFolder(tmp_path, with_index(SIZE))
    part, other = folder.claim(NAME), folder.claim(OTHER)
    assert folder.reserve(part, SIZE, {NAME, OTHER}, {}, polite=True) is None
    publisher = threading.Thread(target=folder.publish, args=(part, NAME))
    listed = os.scandir

    class Slow:
        """A listing that takes so long that the other would have done it by then."""

        def __init__(self, path):
            self.entries = list(listed(path))

        def __enter__(self):
            publisher.start()
            publisher.join(0.3)
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(module.os, "scandir", Slow)
    try:
        assert folder.reserve(other, SIZE, {NAME, OTHER}, {}, polite=True) == "all that is there is in use"
    finally:
        publisher.join()
        os.close(part)
        os.close(other)
