"""Seeds the global generators, also the GPU's, where a run draws: for its model, each step, and each validation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_hydra.data import draws

OF_EVALUATION = 3
"""Ends the key of what is drawn where a model is validated, with the callbacks then, evaluated or predicts."""


@contextmanager
def restored() -> Iterator[None]:
    # The generators are then as before the block.
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    with draws.StateGuard():
        yield
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    with restored():
        draws.seed_by(*key)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(draws.mixed(*key) % 2**63)
        yield


@contextmanager
def seeded_as(seed: int, step: int, rank: int) -> Iterator[None]:
    # As `seed_step` in a training.
    with restored():
        seed_step(seed, step, rank)
        yield


def seed_step(seed: int, step: int, rank: int) -> None:
    mixed = (seed * 1_000_003 + step) * 65_537 + rank
    draws.seed_all(mixed)
    torch.default_generator.manual_seed(mixed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed % 2**63)
