"""Jobs that are asked to end, and machines that go away: what is saved goes on to the same end."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
from distributed import Client

from ddp_hydra.errors import Interrupted, RankFailed
from ddp_hydra.record import Record
from tests.integration.support.chaos import Chaos, Dask, Story, assert_same, dask, signal_all
from tests.integration.test_chaos import TWO_AND_FOUR, slow
from tests.integration.test_chaos import chaos as chaos
from tests.integration.test_chaos import clients as clients
from tests.integration.test_chaos import uninterrupted as uninterrupted

pytestmark = pytest.mark.integration

# -- the end that was asked for ----------------------------------------------------------------------------

REMOTE = ("cluster=remote", "cluster.address=tcp://127.0.0.1:1")
"""Has nannies to strike; the cluster is there already, and the address is not used."""
SLOW = ("data.delay_s=0.02", "+data.val.delay_s=0.02", "trainer.log_every_steps=1")


def assert_same_end(chaos: Chaos, client: Client, story: Story, whole: Story, ranks: int = 2) -> None:
    """What was interrupted is saved, and goes on to the same end."""
    assert isinstance(story.error, Interrupted)
    assert story.summary["status"] == "interrupted"
    assert story.checkpoint()["position"]["step"] == story.summary["steps"] > 0
    resumed = chaos.done(client, ranks=ranks, resume=story)
    assert_same(resumed.checkpoint(), whole.checkpoint())


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("ranks", TWO_AND_FOUR)
def test_an_interrupt_at_any_step_saves_and_a_resume_comes_to_the_same_end(
    chaos, clients, uninterrupted, ranks, number, monkeypatch
):
    monkeypatch.setattr("ddp_hydra.dispatch.attempt.LOOP_START_S", 20.0)  # the signal may come before all ranks' beats
    step = random.Random(f"{ranks} {number}").randrange(1, 9)

    def interrupt(record: Record) -> None:
        if record.kind == "metrics" and record.step == step and "train/loss" in record.data.metrics:
            os.kill(os.getpid(), number)

    slow = (*SLOW, f"data.delay_s={0.05 * ranks}")
    story = chaos(clients[ranks], ranks=ranks, on_record=interrupt, overrides=slow)
    assert step <= story.summary["steps"] <= 18
    assert_same_end(chaos, clients[ranks], story, uninterrupted(clients[ranks], ranks), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", TWO_AND_FOUR)
def test_an_interrupt_during_validation_saves_and_a_resume_validates_first(
    chaos, clients, uninterrupted, ranks, monkeypatch
):
    monkeypatch.setattr("ddp_hydra.dispatch.attempt.LOOP_START_S", 20.0)
    steps: list[int] = []

    def interrupt(record: Record) -> None:
        if record.kind == "metrics":
            steps.append(record.step)
        elif record.kind == "log" and "a validation begins" in record.data.text and steps[-1:] == [11]:
            os.kill(os.getpid(), signal.SIGINT)

    slow = (*SLOW, f"++data.val.delay_s={0.1 * ranks}", "++data.val.says=a validation begins")
    story = chaos(clients[ranks], ranks=ranks, on_record=interrupt, overrides=slow)
    assert story.summary["steps"] == 12
    assert story.checkpoint()["validation_due"] is True
    assert not [line for line in story.lines() if line["step"] == 12 and "val/loss" in line]
    assert_same_end(chaos, clients[ranks], story, uninterrupted(clients[ranks], ranks), ranks)


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(chaos, client2, wait_for, capfd):
    """Rank 1 hangs, so it will never get to its next step."""

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: "A second one ends at once" in capfd.readouterr().err, "an answer to the first")
        os.kill(os.getpid(), signal.SIGINT)

    threads = []

    def interrupt(record: Record) -> None:
        if record.kind == "log" and "fault on purpose" in record.data.text:
            threads.append(threading.Thread(target=strike))
            threads[0].start()

    patient = ("dispatch.hang_timeout_s=600", "dispatch.first_step_timeout_s=600")
    story = chaos(client2, "hang,rank=1,step=9", on_record=interrupt, overrides=patient)
    threads[0].join()
    assert isinstance(story.error, KeyboardInterrupt)
    assert not isinstance(story.error, Interrupted)
    assert story.summary["status"] == "interrupted"
    resumed = chaos.done(client2, resume=story)
    assert resumed.summary["steps"] == 18


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_time_limit_saves_and_a_resume_comes_to_the_same_end(chaos, clients, uninterrupted, ranks):
    limited = ("data.delay_s=0.02", "trainer.time_limit_s=0.4")
    story = chaos(clients[ranks], ranks=ranks, overrides=limited)
    assert "the time of trainer.time_limit_s is up; saved at step" in str(story.error)
    assert 0 < story.summary["steps"] < 18
    assert_same_end(chaos, clients[ranks], story, uninterrupted(clients[ranks], ranks), ranks)


# -- machines that go away ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_machines(warm_server, tmp_path_factory) -> Iterator[tuple[Dask, Client]]:
    """Each worker with a nanny of its own, as `dask worker` starts them; what ends does not come back by itself."""
    with dask(tmp_path_factory.mktemp("machines"), 3) as (cluster, client):
        yield cluster, client


@pytest.fixture
def machines(three_machines) -> tuple[Dask, Client]:
    cluster, client = three_machines
    cluster.heal(client)
    return cluster, client


def program_of(machines: tuple[Dask, Client], story: Story, rank: int) -> psutil.Process:
    """The program that a rank's worker belongs to. It takes a while to find, in which a hang keeps the rank."""
    worker = story.gang.attempt.specs[rank].worker
    return psutil.Process(machines[1].run(os.getppid, workers=[worker])[worker])


@pytest.fixture
def kill_rank_2(chaos, machines) -> Callable[[Record], None]:
    """Kill the worker of rank 2 in the first attempt, after step 5."""

    def kill(record: Record) -> None:
        if record.kind == "metrics" and (record.step, record.attempt) == (5, 0):
            signal_all(program_of(machines, chaos.stories[-1], 2), signal.SIGKILL)

    return kill


@pytest.mark.slow
def test_a_worker_that_is_lost_for_good_is_done_without(chaos, machines, clients, uninterrupted, kill_rank_2, caplog):
    """The global batch stays 24, and the samples come in the same order."""
    _, client = machines
    settings = ("data.batch_size=8", "model.tell=true")
    fewer = ("dispatch.min_ranks=2", "dispatch.restart_wait_s=0.5")
    whole = uninterrupted(clients[4], 3, *settings, "model.dropout=0", *SLOW)
    overrides = (*settings, "model.dropout=0", *fewer, *SLOW)
    story = chaos.done(client, "hang,rank=2,step=7", ranks=3, on_record=kill_rank_2, overrides=overrides)
    assert [(failure.kind, failure.rank) for failure in story.failures] == [("lost", 2)]
    assert story.summary["world_size"] == 2
    changed = "data.batch_size=6 trainer.gradient_accumulation_steps=2"
    assert changed in caplog.text
    samples = story.samples(accumulate={1: 2})
    assert len(samples) == 12
    assert samples == whole.samples()
    for line, expected in zip(story.curve(), whole.curve(), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_global_batch_that_does_not_divide_is_said_to_change(chaos, machines, kill_rank_2, caplog):
    _, client = machines
    fewer = ("dispatch.min_ranks=2", "dispatch.restart_wait_s=0.5", "data.batch_size=5")
    story = chaos.done(client, "hang,rank=2,step=7", ranks=3, on_record=kill_rank_2, overrides=(*SLOW, *fewer))
    assert {failure.kind for failure in story.failures} == {"lost"}
    assert "2 ranks instead of 3: a global batch of 15 does not divide among them" in caplog.text
    assert "so it is 10 now, with data.batch_size=5" in caplog.text
    assert (story.summary["status"], story.summary["world_size"]) == ("done", 2)


@pytest.mark.slow
def test_fewer_ranks_than_allowed_end_the_job_with_what_to_do(chaos, machines, kill_rank_2):
    _, client = machines
    overrides = (*SLOW, "dispatch.restart_wait_s=0.5")
    story = chaos(client, "hang,rank=2,step=7", ranks=3, on_record=kill_rank_2, overrides=overrides)
    assert isinstance(story.error, RankFailed)
    assert "2 of 3 workers are there, fewer than 3" in str(story.error)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", slow("save")])
def test_a_killed_nanny_takes_its_rank_along_and_a_spare_worker_takes_over(
    chaos, machines, clients, uninterrupted, place
):
    _, client = machines
    story = chaos.done(client, f"nanny,rank=1,step=8,at={place}", overrides=(*REMOTE, *SLOW))
    (failure,) = story.failures
    assert (failure.kind, failure.rank) == ("lost", 1)
    assert_same(story.checkpoint(), uninterrupted(clients[2], 2).checkpoint())


@pytest.mark.slow
@pytest.mark.parametrize(("step", "place", "ranks"), [(9, "forward", 2), slow(8, "save", 2), slow(12, "validate", 2)])
def test_sigterm_to_a_dask_worker_saves_at_the_next_step(chaos, machines, clients, uninterrupted, step, place, ranks):
    """Sent to the nanny, as by a batch system that ends a job step."""
    cluster, client = machines
    slow = (*REMOTE, *SLOW, f"data.delay_s={0.02 * ranks}")
    story = chaos(client, f"term,rank=1,step={step},at={place}", ranks=ranks, overrides=slow)
    assert "a worker is being shut down (SIGTERM); saved at step" in str(story.error)
    assert story.over == []
    assert story.summary["steps"] >= step
    cluster.heal(client)
    assert_same_end(chaos, client, story, uninterrupted(clients[ranks], ranks), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("step", [slow(9), 12], ids=["mid-epoch", "validation"])
def test_sigterm_to_all_processes_of_a_machine_saves_at_the_next_step(
    chaos, machines, clients, uninterrupted, warm_server, step
):
    """As when a container is stopped, or a spot instance is taken away: nanny, worker and rank hear it at once."""
    cluster, client = machines

    def stop(record: Record) -> None:
        if record.kind == "metrics" and record.step == step and "train/loss" in record.data.metrics:
            (rank,) = (process for process in warm_server.children() if "rank 1/2" in " ".join(process.cmdline()))
            rank.send_signal(signal.SIGTERM)
            signal_all(program_of(machines, chaos.stories[-1], 1), signal.SIGTERM)

    story = chaos(client, on_record=stop, overrides=(*SLOW, "++data.val.delay_s=0.2"))
    assert "a worker is being shut down (SIGTERM); saved at step" in str(story.error)
    assert story.over == []
    assert step <= story.summary["steps"] <= step + 3
    cluster.heal(client)
    assert_same_end(chaos, client, story, uninterrupted(clients[2], 2))
