from __future__ import annotations

import mmap

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra import heartbeat
from ddp_hydra.errors import OutOfMemory
from ddp_hydra.training import memory

CFG = OmegaConf.create({"data": {"batch_size": 64}, "trainer": {"precision": "fp32", "gradient_accumulation_steps": 1}})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.ReLU()


def test_a_full_memory_says_what_took_it_and_what_to_type():
    heartbeat.connect(None)
    model = nn.Sequential(Block(), Block(), nn.Linear(2, 2))
    memory.watch(model)
    with pytest.raises(OutOfMemory) as caught, memory.explained(CFG):
        torch.empty(2**60, dtype=torch.uint8)
    said = str(caught.value)
    for part in (
        "no memory left on cpu in step 0",
        "data.batch_size=32 trainer.gradient_accumulation_steps=2",
        "trainer.precision=bf16",
        "trainer.activation_checkpointing=[Block]",
        "torch said: ",
    ):
        assert part in said


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), memory.explained(CFG):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_the_peak_is_what_was_taken():
    cpu, process = torch.device("cpu"), psutil.Process()
    before, size = memory.peak_bytes(cpu), 64 * 2**20
    # Memory that malloc has kept of earlier tests would not be new.
    taken = torch.frombuffer(mmap.mmap(-1, before - process.memory_info().rss + size), dtype=torch.uint8).fill_(1)
    now = process.memory_info().rss
    assert before + size // 2 < now
    assert abs(memory.peak_bytes(cpu) - now) < size // 2
    assert taken.all()
