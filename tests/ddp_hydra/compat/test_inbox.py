"""What ranks of `dispatch.run` submit to a `DaskResultsHandler`."""

from __future__ import annotations

import hashlib

import pytest

from ddp_hydra.compat.dask_pytorch_ddp import results
from ddp_hydra.compat.dask_pytorch_ddp.results import FileInbox
from ddp_hydra.errors import RecordError
from ddp_hydra.record import File, Record


def test_a_file_without_the_folder_of_a_handler_is_refused():
    file = File("note.txt", 2, "", inline="aGk=")
    with pytest.raises(RecordError, match=r"rank 1 sent 'note\.txt', a file without a folder"):
        FileInbox(lambda *_: None).receive(Record(file, 1))


def test_a_file_that_is_submitted_again_takes_the_place_of_the_one_before(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "KEPT_BYTES", 10)
    one = FileInbox(lambda record, target: target.write_bytes(record.data.source.encode()))
    for content in ("first.", "second", "and a third"):  # which is too large
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        one.receive(Record(File(path="a/b", size=len(content), sha256=sha256, source=content)))
    one.deliver("a", tmp_path)
    assert (tmp_path / "b").read_bytes() == b"second"
