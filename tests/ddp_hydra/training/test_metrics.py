"""Sums of batches: added up over micro-batches and ranks, exactly."""

from __future__ import annotations

import pytest
import torch

from ddp_hydra.tasks import Step, Task
from ddp_hydra.training.metrics import Meter, added, count
from ddp_hydra.training.train_step import as_step

CPU = torch.device("cpu")


def counted(*steps, size=2, update=""):
    meter = Meter(CPU)
    meter.add(*[count(as_step(step), size, update) for step in steps])
    return meter


def as_numbers(sums):
    return {name: part.tolist() for name, part in sums.items()}


def test_sums_of_any_shape_are_added_up():
    one = Step(torch.tensor(0.5), 4, {"pixels": torch.tensor([1, 2]), "right": torch.tensor(3), "seen": 4})
    other = Step(torch.tensor(1.0), 2, {"pixels": torch.tensor([10, 20]), "right": torch.tensor(30), "seen": 2})
    found = counted(one, other).result()
    assert as_numbers(found) == {"loss": 4.0, "pixels": [11.0, 22.0], "right": 33.0, "seen": 6.0, "n": 6.0}
    assert {part.dtype for part in found.values()} == {torch.float64}


def test_a_loss_alone_counts_by_its_samples():
    assert as_numbers(counted(torch.tensor(0.5), torch.tensor(1.5), size=3).result()) == {"loss": 6.0, "n": 6.0}


def test_a_number_that_depends_on_the_data_stays_on_the_device():
    one = count(Step(torch.tensor(0.5), torch.tensor(6)), 2)
    assert (one.numbers, dict(one.shapes).keys()) == ({}, {"loss", "n"})
    assert as_numbers(counted(Step(torch.tensor(0.5), torch.tensor(6))).take()) == {"loss": 3.0, "n": 6.0}


def test_sums_are_counted_on_the_device_of_the_loss():
    step = Step(torch.zeros((), device="meta"), 2, {"right": torch.tensor(3), "seen": (torch.tensor(1), 2)})
    assert count(step, 2).sums.device.type == "meta"


def test_a_sum_with_a_slash_in_its_name_is_divided_by_its_own_count_or_by_n():
    sums = {"top/5": torch.tensor(3), "right": (torch.tensor(1), 2), "right/first": torch.tensor(2), "a/b": (6, 3)}
    for update in ("", "critic"):
        found = Task().metrics(counted(Step(torch.tensor(0.5), 4, sums), update=update).result())
        expected = {"loss": 0.5, "top/5": 0.75, "right": 0.5, "right/first": 0.5, "a/b": 2.0}
        assert found == {f"{update}/{name}".lstrip("/"): value for name, value in expected.items()}


def test_updates_with_a_name_are_counted_apart():
    meter = counted(Step(torch.tensor(2.0)), update="generator")
    meter.add(count(Step(torch.tensor(3.0)), 2, "discriminator"))
    expected = {"generator/loss": 4.0, "generator/n": 2.0, "discriminator/loss": 6.0, "discriminator/n": 2.0}
    assert as_numbers(meter.take()) == expected


def test_a_result_begins_anew_and_of_nothing_there_is_none():
    meter = counted(torch.tensor(1.0))
    assert meter.result()
    assert meter.result() == {}


def test_counting_keeps_no_graph_and_changes_nothing_of_the_task():
    weight = torch.ones((), requires_grad=True)
    sums = {"right": torch.tensor(1.0)}
    meter = counted(Step(weight * 2, 1, sums), Step(weight * 2, 1, sums))
    assert not any(part.requires_grad for part in meter.on_device.values())
    meter.take()
    assert sums == {"right": torch.tensor(1.0)}


def test_many_small_losses_do_not_drown():
    """In single precision the sum would stop growing at 2**24."""
    meter = counted(Step(torch.tensor(2.0**24), 1), Step(torch.tensor(1.0), 1))
    assert meter.result()["loss"].item() == 2.0**24 + 1


@pytest.mark.gpu
def test_on_a_gpu_the_sums_stay_there():
    meter = Meter(torch.device("cuda"))
    meter.add(count(Step(torch.tensor(0.5, device="cuda"), 4, {"right": torch.tensor(3, device="cuda")}), 4))
    assert all(part.is_cuda for part in meter.on_device.values())
    assert as_numbers(meter.result()) == {"loss": 2.0, "right": 3.0, "n": 4.0}


# -- over ranks ------------------------------------------------------------------------------------------------


def test_what_only_some_ranks_count_is_added_up():
    of_ranks = [
        {"loss": torch.tensor(1.0).double(), "n": torch.tensor(2.0).double()},
        {"loss": torch.tensor(3.0).double(), "n": torch.tensor(4.0).double(), "seen": torch.tensor([5.0, 6.0])},
        {},
    ]
    assert as_numbers(added(of_ranks)) == {"loss": 4.0, "n": 6.0, "seen": [5.0, 6.0]}


def test_a_sum_that_changes_its_shape_is_refused():
    with pytest.raises(ValueError, match=r"'seen' have the shapes \(2,\) and \(3,\): give each sum one shape"):
        added([{"seen": torch.zeros(2)}, {"seen": torch.zeros(3)}])
