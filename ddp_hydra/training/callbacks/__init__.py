"""Calls the code of a user at certain moments of a run."""

from ddp_hydra.training.callbacks.base import Callback, View
from ddp_hydra.training.callbacks.histograms import Histograms
from ddp_hydra.training.callbacks.unfreeze import Unfreeze
from ddp_hydra.training.callbacks.wall_clock import WallClock

__all__ = ["Callback", "Histograms", "Unfreeze", "View", "WallClock"]
