"""The time that steps wait for gradients, from the times that DistributedDataParallel takes."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hydra.tasks import Task
from ddp_hydra.training.monitor import ExchangeTime
from ddp_hydra.training.parallel import PartStep
from ddp_hydra.training.parallel.ddp import DDPStep
from ddp_hydra.training.train_step import TrainStep


class Timed(DistributedDataParallel):
    """Has the times that it is given."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.times: dict[str, Any] = {"iteration": 0}

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.times

    def took(self, iteration: int, exchange_s: float, hidden_s: float) -> None:
        self.times = {
            "iteration": iteration,
            "backward_comm_time": int(1e9 * exchange_s),
            "backward_compute_comm_overlap_time": int(1e9 * hidden_s),
        }


def exchange_s(module: DistributedDataParallel) -> float:
    return DDPStep.exchange_s(SimpleNamespace(wrapped=module))  # type: ignore[arg-type]


def parts_of(*modules: DistributedDataParallel, held_s: float = 0.0) -> Any:
    return [SimpleNamespace(exchange_s=partial(exchange_s, module), held_s=lambda: held_s) for module in modules]


def exchange_of(*modules: DistributedDataParallel, held_s: float = 0.0, ranks: int = 2) -> ExchangeTime:
    exchange = ExchangeTime(ranks)
    exchange.watch(parts_of(*modules, held_s=held_s))
    return exchange


def measured(exchange: ExchangeTime, steps: int, other_s: float = math.nan) -> float | None:
    """End an interval in which the other rank waited `other_s`, or as long."""
    exchange.steps = steps
    own_s = exchange.local_seconds()
    exchange.interval([own_s, own_s if math.isnan(other_s) else other_s])
    return exchange.total_s


def test_what_the_backward_pass_does_not_hide_is_counted_for_all_steps():
    module = Timed()
    exchange = exchange_of(module)
    assert measured(exchange, 10) is None
    module.took(10, exchange_s=0.005, hidden_s=0.003)
    assert measured(exchange, 100) == pytest.approx(0.2)
    module.took(200, exchange_s=0.006, hidden_s=0.002)
    assert measured(exchange, 100) == pytest.approx(0.6)
    assert measured(exchange, 100, other_s=0.2) == pytest.approx(0.9)
    module.took(300, exchange_s=0.001, hidden_s=0.002)  # clocks of a GPU may be a little apart
    assert measured(exchange, 100) == pytest.approx(0.9)


def test_the_updates_of_a_step_add_up():
    modules = Timed(), Timed()
    exchange = exchange_of(*modules)
    modules[0].took(5, exchange_s=0.2, hidden_s=0.1)
    assert measured(exchange, 10) is None
    modules[1].took(5, exchange_s=0.4, hidden_s=0.1)
    assert measured(exchange, 10) == pytest.approx(4.0)


def test_what_hooks_have_waited_is_added_once():
    module = Timed()
    exchange = exchange_of(module, held_s=3.0)
    module.took(5, exchange_s=0.2, hidden_s=0.2)
    assert measured(exchange, 10) == pytest.approx(3.0)
    assert measured(exchange, 10) == pytest.approx(3.0)


def test_it_is_not_known_of_other_wrappers():
    module = Timed()
    module.took(5, exchange_s=0.2, hidden_s=0.1)
    exchange = ExchangeTime(2)
    exchange.watch([*parts_of(module), PartStep(TrainStep(Task(), nn.Linear(1, 1)))])
    assert measured(exchange, 10) is None


@pytest.mark.usefixtures("group")
def test_one_rank_waits_for_nobody_and_torch_has_the_times_that_are_read():
    module = DistributedDataParallel(nn.Linear(3, 3))
    assert exchange_of(module, ranks=1).total_s == 0.0
    assert math.isnan(exchange_s(module))
    for _ in range(4):
        module(torch.ones(1, 3)).sum().backward()
    assert 0 <= exchange_s(module) < math.inf


def test_updates_that_are_made_anew_add_their_time_to_that_of_those_before():
    module, larger = Timed(), Timed()
    exchange = exchange_of(module)
    module.took(10, exchange_s=0.003, hidden_s=0.001)
    assert measured(exchange, 100) == pytest.approx(0.2)
    exchange.watch(parts_of(larger))
    larger.took(3, exchange_s=0.05, hidden_s=0.01)
    assert measured(exchange, 10) == pytest.approx(0.2 + 0.4)
