"""Iterable data sets: they are split over ranks, end on all of them in the same step, and resume where they stopped.

`part.py` reads what belongs to one rank; `loader.py` counts its steps, agrees with the other ranks when they end, and
makes their batches ahead of the loop. The loop sees a sampler and a loader as of any data set.
"""

from ddp_hydra.data.streams.loader import StreamLoader, StreamSampler
from ddp_hydra.data.streams.part import Part, RepeatedPart, split, whole
from ddp_hydra.data.wrappers import is_stream

__all__ = ["Part", "RepeatedPart", "StreamLoader", "StreamSampler", "is_stream", "split", "whole"]
