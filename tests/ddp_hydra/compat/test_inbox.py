"""What ranks of `dispatch.run` submit to a `DaskResultsHandler`."""

from __future__ import annotations

import pytest

from ddp_hydra.compat.dask_pytorch_ddp.inbox import Inbox
from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record


def test_a_file_without_the_folder_of_a_handler_is_refused():
    data = {"path": "note.txt", "size": 2, "sha256": "", "inline": "aGk="}
    with pytest.raises(RecordError, match=r"rank 1 sent 'note\.txt', a file without a folder"):
        Inbox(lambda *_: None).receive(Record("file", data, 1))
