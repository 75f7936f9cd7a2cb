"""Takes files from ranks to a folder of the client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from ddp_hydra import results
from ddp_hydra.compat.dask_pytorch_ddp import inbox
from ddp_hydra.dispatch.background import RankFuture

log = logging.getLogger(__name__)


class DaskResultsHandler:
    """Made on the client, used in the function that `dispatch.run` runs, as a global, a closure or an argument.

    Args:
        pub_sub_key: tells the files of several handlers apart; None: a new one.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        self.pub_sub_key = uuid4().hex if pub_sub_key is None else pub_sub_key

    def submit_result(self, path: str, data: bytes | str) -> None:
        """Send a file; called on a rank.

        Args:
            path: below the folder that `process_results` is given.
            data: its content; str is written as UTF-8.

        Raises:
            RecordError: `path` leaves that folder, or this process is not a rank.
        """
        results.check_path(path)
        results.submit(f"{inbox.folder_of(self.pub_sub_key)}/{path}", data)

    def process_results(self, prefix: str | Path, futures: Sequence[RankFuture], raise_errors: bool = True) -> None:
        """Write files into a folder as they come, until all ranks have ended. Ctrl-C stops the ranks.

        Args:
            prefix: the folder, made if it is missing.
            futures: what `dispatch.run` has returned.
            raise_errors: whether to raise the error of a rank; otherwise it is logged.

        Raises:
            RankFailed: a rank raised, exited or was killed.
        """
        for one in inbox.inboxes(futures):
            one.deliver(inbox.folder_of(self.pub_sub_key), Path(prefix).expanduser().absolute())
        logged: set[int] = set()
        for future in futures:
            try:
                future.result()
            except Exception as error:
                if raise_errors:
                    raise
                if id(error) not in logged:  # that of one rank ends all
                    log.error("%s", error)
                logged.add(id(error))
