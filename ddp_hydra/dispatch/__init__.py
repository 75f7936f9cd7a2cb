"""Runs a function on all ranks of a gang: `dispatch.run(client, fn, …)`."""

from ddp_hydra.dispatch.call import Call, show
from ddp_hydra.dispatch.gang import Gang, run
from ddp_hydra.dispatch.script import script

__all__ = ["Call", "Gang", "run", "script", "show"]
