"""Runs the task of another Hydra app on each rank of a gang: `hydra.launcher.ranks=2`."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import configure_log, env_override, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra.config.hydra_compat import allowing, targets_allowed_by, variables_of_job


def on_ranks(task: TaskFunction, ranks: int, context: HydraContext) -> Callable[[DictConfig], Any]:
    def run(cfg: DictConfig) -> Any:
        from ddp_hydra.cluster import connect
        from ddp_hydra.dispatch.call import pickled_call
        from ddp_hydra.dispatch.gang import Gang
        from ddp_hydra.rank.environment import of_job
        from ddp_hydra.writers.handler import ResultsHandler, default_writers

        hydra_cfg = HydraConfig.get()
        folder, variables = Path(hydra_cfg.runtime.output_dir), of_job(variables_of_job(hydra_cfg.job))
        with_it = HydraConfig.instance().cfg, Singleton.get_state(), targets_allowed_by(context), variables
        call = pickled_call(task, (cfg, *with_it), {})
        with connect.connect(DictConfig({})) as client:
            gang = Gang(
                client, ranks, on_record=lambda record: handler.handle(record), name="task", sweep=connect.sweep()
            )
            with ResultsHandler(default_writers(folder, gang.fetch, tensorboard=False)) as handler:
                return gang.run("ddp_hydra.sweep.other_apps:run_task", call, sys.path)[0]

    return run


def run_task(call: bytes, path: list[str]) -> Any:
    """Run the task on a rank; `call` is pickled by `on_ranks`, and `path` has the folders of the app's modules."""
    sys.path += [folder for folder in path if folder not in sys.path]
    task, (cfg, hydra_cfg, state, targets, variables), _ = pickle.loads(call)  # noqa: S301 (on a rank)
    setup_globals()
    Singleton.set_state(state)
    HydraConfig.instance().cfg = hydra_cfg
    if os.environ.get("RANK") == "0":
        set_up_logging(hydra_cfg)
    with allowing(targets), env_override(variables):
        return task(cfg)


def set_up_logging(hydra_cfg: DictConfig) -> None:
    try:
        configure_log(hydra_cfg.hydra.job_logging, hydra_cfg.hydra.verbose)
    except ValueError as error:  # the job's folder is on another host
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
        reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        print(f"hydra.job_logging cannot be set up on this host, so what is logged is printed here: {reason}")  # noqa: T201
