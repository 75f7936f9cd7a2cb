"""`ddp-hydra attach run=s3://bucket/runs/<date>/<time>`: show a run that goes on without its command.

It reads the store only. The exit code is that of the run: 0 done, 1 failed, 130 interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import MISSING

from ddp_hydra.cli.key_value import parse
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job.remote.attached import Attached
from ddp_hydra.job.remote.status import LOST_S
from ddp_hydra.storage.run_ref import RunRef

USAGE = """ddp-hydra attach run=<URL or run directory> [stop=true] [lost_timeout_s=20]"""


@dataclass
class Options:
    """The options of this command.

    Args:
        run: URL of the results, or a run directory that points to them.
        stop: have the run save a checkpoint and end.
        lost_timeout_s: a driver that has not updated its status for so long is considered lost, in seconds.
    """

    run: str = MISSING
    stop: bool = False
    lost_timeout_s: float = LOST_S


def main(words: Sequence[str]) -> None:
    """Show a run until it ends.

    Raises:
        Interrupted: the run was interrupted; or Ctrl-C, which leaves the run alone.
        RunFailed: the run failed, or its driver is lost.
        ConfigError: there is no run, or its store cannot be read.
    """
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    options, others = parse(Options, words, USAGE)
    if others:
        raise ConfigError(f"{others[0]!r}: the keys are run, stop, lost_timeout_s; usage:\n{USAGE}")
    store = RunRef.of(options.run).store()
    attached = Attached(store, options.lost_timeout_s)
    try:
        attached.begin()
        if options.stop:
            attached.stop()
        attached.follow()
    except ConnectionError as error:
        raise ConfigError(f"{error}; the run does not need this command: try again later") from None
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted):
            raise
        raise Interrupted(f"the run goes on; to end it: ddp-hydra attach run={store.url} stop=true") from None
