"""Runs a function on every worker, and returns futures at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from distributed import Client

from ddp_hydra.compat.dask_pytorch_ddp import results
from ddp_hydra.dispatch import Call, Gang
from ddp_hydra.dispatch.background import RankFuture
from ddp_hydra.dispatch.call import check_arguments


def run(
    client: Client,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: str = "auto",
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> list[RankFuture]:
    """Start a function on every worker, each call one rank of a process group, and return at once.

    Args:
        client: of the Dask cluster.
        pytorch_function: finds its process group initialised, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
            MASTER_PORT in the environment.
        args: passed to it.
        backend: gloo, nccl, or auto: nccl where there are GPUs, else gloo.
        pass_local_rank: whether to pass `local_rank`, the rank's number on its host.
        kwargs: passed to it.

    Returns:
        A future for each worker, in order of rank, with what the function returned: plain data, arrays and tensors.

    Raises:
        ConfigError: the function does not take these arguments.
    """
    local = {"local_rank": 0} if pass_local_rank else {}
    check_arguments(Call(pytorch_function, args, {**kwargs, **local}))
    gang = Gang(client, on_record=lambda record: files.receive(record), name="dask-pytorch-ddp", backend=backend)
    files = results.FileInbox(gang.fetch)
    running = gang.start(partial(_call, pytorch_function, pass_local_rank), *args, **kwargs)
    results.inboxes[running] = files
    return running.futures


def _call(function: Callable[..., Any], pass_local_rank: bool, /, *args: Any, **kwargs: Any) -> Any:
    if pass_local_rank:
        kwargs["local_rank"] = int(os.environ["LOCAL_RANK"])
    return function(*args, **kwargs)
