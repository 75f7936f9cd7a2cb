"""Each fault, on 2 and 4 ranks, at each moment: named, stopped in time, cleaned up, and survived without a difference.

A fault is injected the way users rehearse theirs, with the config key `faults`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from distributed import Client

from ddp_hydra.errors import Interrupted, RankFailed
from ddp_hydra.record import Record
from tests.integration.support.chaos import SETTINGS, Chaos, Dask, Story, assert_same, dask, signal_all

pytestmark = pytest.mark.integration


def slow(*values: Any) -> Any:
    """Make a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


TWO_AND_FOUR = [2, slow(4)]


IMPATIENT = ("dispatch.hang_timeout_s=4", "dispatch.first_step_timeout_s=6")
"""For jobs that hang. All others have a minute, in which a busy machine gets to its next step."""


@pytest.fixture
def chaos(project, tmp_path, ranks_alive) -> Chaos:
    return Chaos(project, tmp_path, ranks_alive)


@pytest.fixture(scope="module")
def uninterrupted(project, tmp_path_factory, ranks_alive) -> Callable[..., Story]:
    """The same job, without faults; run when it is first asked for."""
    chaos = Chaos(project, tmp_path_factory.mktemp("uninterrupted"), ranks_alive)

    @functools.cache
    def run(client: Client, ranks: int, *overrides: str) -> Story:
        return chaos.done(client, ranks=ranks, overrides=overrides)

    return run


@pytest.fixture(scope="module")
def clients(client2, client4) -> dict[int, Client]:
    return {2: client2, 4: client4}


@pytest.fixture(scope="module")
def client_to_kill(warm_server, tmp_path_factory) -> Iterator[Callable[[int], Client]]:
    """Start a cluster of so many workers when first asked. They come back, and are not children of the tests."""
    folder = tmp_path_factory.mktemp("dask")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def client(ranks: int) -> Client:
            return stack.enter_context(dask(folder / str(ranks), 1, workers_each=ranks))[1]

        yield client


# -- the matrix --------------------------------------------------------------------------------------------

FAULTS = {
    "raise": ("raised", "InjectedFault: a fault on purpose"),
    "exit": ("exited", "the process exited with code 3 before its work was done"),
    "kill": ("killed", "killed by SIGKILL"),
    "segv": ("killed", "killed by SIGSEGV"),
    "hang": ("hung", "hangs: no progress for "),
    "stop": ("hung", "its process is suspended (SIGSTOP, or a debugger)"),
    "worker": ("lost", "left the cluster (killed, out of memory, or its host is gone)"),
}
"""The kind of failure that each shall be taken for, and what is said."""

LAST = -1
MOMENTS = {
    "first step": (0, 1, "forward", 0),
    "mid-epoch": (LAST, 9, "backward", 6),
    "checkpoint": (LAST, 8, "save", 4),
    "validation": (0, 12, "validate", 6),
    "set-up": (LAST, 0, "start", 0),
    "checkpoint's file": (0, 8, "write", 6),
}
"""Which rank, in which step, doing what, and from which step on there may be something to do again.

An epoch ends after steps 6, 12 and 18. Checkpoints come after 4, 6, 8, 12, 16 and 18, in the background.
"""

QUICK = {
    ("raise", "set-up", 2),
    ("exit", "validation", 2),
    ("kill", "checkpoint's file", 2),
    ("hang", "checkpoint", 2),
    ("worker", "mid-epoch", 2),
}
"""Each kind of failure once; the others are slow."""

MATRIX = [
    pytest.param(
        fault, moment, ranks, id=f"{fault}-{moment}-{ranks}",
        marks=() if (fault, moment, ranks) in QUICK else pytest.mark.slow,
    )
    for fault in FAULTS
    for moment in MOMENTS
    for ranks in (2, 4)
    # The last two are variants of the others, for which two ranks and the faults that come another way will do.
    if moment not in ("set-up", "checkpoint's file") or (ranks == 2 and fault in ("raise", "kill", "hang"))
]  # fmt: skip


def test_the_quick_cases_have_each_kind_of_failure():
    quick = {tuple(case.values) for case in MATRIX if not case.marks}
    assert quick == QUICK
    assert {FAULTS[fault][0] for fault, _, _ in quick} == {kind for kind, _ in FAULTS.values()}


@pytest.mark.parametrize(("fault", "moment", "ranks"), MATRIX)
def test_a_fault_is_named_stopped_cleaned_up_and_makes_no_difference(
    chaos, clients, client_to_kill, uninterrupted, fault, moment, ranks
):
    client = client_to_kill(ranks) if fault == "worker" else clients[ranks]
    whole = uninterrupted(clients[ranks], ranks)
    rank, step, place, saved = MOMENTS[moment]
    rank %= ranks
    overrides = IMPATIENT if fault in ("hang", "stop") else ()
    story = chaos.done(client, f"{fault},rank={rank},step={step},at={place}", ranks=ranks, overrides=overrides)

    (over,) = story.over
    kind, message = FAULTS[fault]
    assert (over.failure.kind, over.failure.rank, over.failure.host) == (kind, rank, "127.0.0.1")
    assert message in over.failure.message
    assert_step(over.failure.step, fault, step, place)
    assert over.ranks == []
    if fault != "worker":  # whose relay can't pass on what the rank says last
        assert story.strikes() == 1
        (begin,) = (record.step for record in story.records if record.kind == "start" and record.attempt == 1)
        assert begin >= saved

    assert_survived(story, whole, restarts=1)


def assert_step(found: int, fault: str, step: int, place: str) -> None:
    """The failure names the step."""
    if fault == "worker":  # which the client has last heard a second ago
        assert 0 <= found <= step + 4 * (place == "write")
    elif place == "write":  # the loop goes on meanwhile, at most to the next checkpoint
        assert step <= found <= 12
    else:
        assert found == step


def assert_survived(story: Story, whole: Story, restarts: int) -> None:
    """The job went on after its faults, and ended as if there had been none."""
    summary = story.summary
    assert (summary["restarts"], summary["failure"]) == (restarts, None)
    assert [attempt["failure"]["kind"] for attempt in summary["attempts"]] == [over.failure.kind for over in story.over]
    assert_same(story.checkpoint(), whole.checkpoint())
    assert story.curve() == whole.curve()


# -- restarts ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_faults_on_end_and_the_curves_read_as_one(chaos, client2, uninterrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole = uninterrupted(client2, 2)
    story = chaos.done(client2, "kill,rank=0,step=11,at=update", "raise,rank=1,step=15,attempt=1")
    assert [(failure.kind, failure.rank, failure.step) for failure in story.failures] == [
        ("killed", 0, 11),
        ("raised", 1, 15),
    ]
    assert_survived(story, whole, restarts=2)
    assert [line["step"] for line in story.lines()] == [line["step"] for line in whole.lines()]  # each is there once
    events = EventAccumulator(str(story.folder / "tensorboard"), purge_orphaned_data=True).Reload()
    fields = ("step", "epoch", "samples")
    expected = {
        name: [(line["step"], pytest.approx(line[name])) for line in whole.curve() if name in line]
        for name in {name for line in whole.curve() for name in line if name not in fields}
    }
    for name, points in expected.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == points


@pytest.mark.slow
def test_a_checkpoint_under_way_is_completed_when_another_rank_fails(chaos, client2, uninterrupted, caplog):
    story = chaos.done(client2, "slow,rank=0,step=8,at=write,seconds=6", "raise,rank=1,step=9")
    assert [record.step for record in story.records if record.kind == "start"] == [0, 8]
    assert "rank 0 is writing a checkpoint: it gets up to 30 s more for it" in caplog.text
    assert_survived(story, uninterrupted(client2, 2), restarts=1)


@pytest.mark.slow
def test_a_fault_after_the_last_checkpoint_costs_no_result(chaos, client2, uninterrupted):
    """Nothing is left to be done then, but to say how it went."""

    def kill(record: Record) -> None:
        if record.kind == "file" and record.step == 18:
            time.sleep(0.2)

    whole = uninterrupted(client2, 2)
    story = chaos.done(client2, "hang,rank=0,step=18,at=save", on_record=kill, overrides=IMPATIENT)
    assert story.failures[0].kind == "hung"
    assert_survived(story, whole, restarts=1)
    assert story.summary["metrics"].keys() == whole.summary["metrics"].keys()


@pytest.mark.slow
def test_an_error_that_comes_again_in_the_same_step_is_not_tried_a_third_time(chaos, client2):
    story = chaos(client2, "raise,rank=1,step=9,attempt=-1")
    assert isinstance(story.error, RankFailed)
    assert "rank 1 on 127.0.0.1: InjectedFault: a fault on purpose (in step 9)" in str(story.error)
    assert "the same failure in step 9 in two attempts running: it was not tried again" in str(story.error)
    summary = story.summary
    assert (summary["status"], summary["restarts"], len(summary["attempts"])) == ("failed", 1, 2)
    assert (summary["failure"]["rank"], summary["failure"]["step"], summary["failure"]["attempt"]) == (1, 9, 1)


@pytest.mark.slow
def test_used_up_restarts_say_so(chaos, client2):
    strikes = ("kill,rank=0,step=9", "exit,rank=1,step=10,attempt=1", "raise,rank=0,step=11,attempt=2")
    story = chaos(client2, *strikes, overrides=("dispatch.max_restarts=2",))
    assert [failure.kind for failure in story.failures] == ["killed", "exited", "raised"]
    assert "all 2 restarts of dispatch.max_restarts=2 are used up" in str(story.error)
    assert story.summary["failure"]["kind"] == "raised"


@pytest.mark.slow
def test_no_restart_is_made_where_none_is_allowed(chaos, client2):
    story = chaos(client2, "kill,rank=1,step=9", overrides=("dispatch.max_restarts=0",))
    assert isinstance(story.error, RankFailed)
    assert [failure.kind for failure in story.failures] == ["killed"]
    assert "restarts" not in str(story.error)
    assert story.summary["restarts"] == 0


# -- no false alarms ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_first_step_is_no_hang(chaos, client2, uninterrupted):
    patient = ("dispatch.hang_timeout_s=4", "dispatch.first_step_timeout_s=60")
    story = chaos.done(client2, "slow,rank=0,step=1,seconds=8", overrides=patient)
    assert_survived(story, uninterrupted(client2, 2), restarts=0)


@pytest.mark.slow
def test_a_validation_longer_than_the_timeout_is_no_hang(chaos, client2, uninterrupted):
    """Each of a rank's 19 samples takes its time; two batches are read at once."""
    settings = ("trainer.epochs=2", "trainer.validate_every_epochs=2", "dispatch.hang_timeout_s=4")
    story = chaos.done(client2, overrides=(*settings, "+data.val.delay_s=0.6"))
    assert story.over == []
    assert_same(story.checkpoint(), uninterrupted(client2, 2, *settings).checkpoint())


@pytest.mark.slow
def test_a_client_that_takes_its_time_for_checkpoints_is_no_hang(chaos, client2, uninterrupted):
    """Rank 0 waits for room in its spool, and the others for rank 0."""
    settings = ("trainer.checkpoint_every_steps=1", "results.keep_checkpoints=20", "dispatch.hang_timeout_s=4")

    def take_time(record: Record) -> None:
        if record.kind == "file":
            time.sleep(8.0 if record.step == 1 else 0.1)

    story = chaos.done(client2, on_record=take_time, overrides=settings)
    assert_survived(story, uninterrupted(client2, 2, *settings), restarts=0)


# -- a loss that is not a number ---------------------------------------------------------------------------

PLAIN = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.lr=0.1", "scheduler=none")
NEVER_IN_STEP_9 = (
    *PLAIN,
    "scheduler._target_=torch.optim.lr_scheduler.LambdaLR",
    "~scheduler.warmup_steps",
    "~scheduler.warmup_epochs",
    "~scheduler.by",
    "+scheduler.lr_lambda={_target_:operator.ne,_partial_:true,_args_:[8]}",
)


def all_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(all_finite, value.values()))
    return (
        all(map(all_finite, value)) if isinstance(value, list) else not isinstance(value, float) or math.isfinite(value)
    )


@pytest.mark.parametrize("ranks", TWO_AND_FOUR)
def test_a_loss_of_nan_aborts_with_the_rank_the_step_and_the_samples_and_is_not_tried_again(
    chaos, clients, uninterrupted, ranks
):
    whole = uninterrupted(clients[ranks], ranks, "model.tell=true")
    rank, each = ranks - 1, 16 // ranks
    story = chaos(clients[ranks], f"nan,rank={rank},step=9", ranks=ranks)
    (failure,) = story.failures
    assert (failure.kind, failure.rank, failure.step) == ("raised", rank, 9)
    ids = ", ".join(map(str, whole.samples()[9][rank * each :]))
    assert f"the loss is nan in step 9; samples of this rank: {ids}." in str(story.error)
    (told,) = [json.loads(r.data.text) for r in story.records if r.kind == "text" and r.data.name == "nonfinite"]
    assert (told["rank"], told["step"], told["samples"]) == (rank, 9, whole.samples()[9][rank * each :])
    assert (story.summary["status"], story.summary["restarts"]) == ("failed", 0)


@pytest.mark.parametrize("policy", [slow("skip"), "rollback"])
@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), slow(0, 2), slow(0, 4), slow(3, 4)])
def test_a_step_with_a_loss_of_nan_is_left_out_by_all_ranks(chaos, clients, uninterrupted, rank, ranks, policy):
    """As if the learning rate had been 0 in it, whichever rank it was."""
    expected = uninterrupted(clients[ranks], ranks, *NEVER_IN_STEP_9)
    settings = (*PLAIN, f"trainer.on_nonfinite={policy}")
    story = chaos.done(clients[ranks], f"nan,rank={rank},step=9", ranks=ranks, overrides=settings)
    assert story.over == []
    assert_same(story.checkpoint()["model"], expected.checkpoint()["model"])
    assert all_finite(story.checkpoint())
    assert all_finite(story.lines())


# -- the end that was asked for ----------------------------------------------------------------------------

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
    chaos, clients, uninterrupted, ranks, number
):
    step = random.Random(f"{ranks} {number}").randrange(1, 9)

    def interrupt(record: Record) -> None:
        if record.kind == "metrics" and record.step == step and "train/loss" in record.data.metrics:
            os.kill(os.getpid(), number)

    slow = (*SLOW, f"data.delay_s={0.02 * ranks}")
    story = chaos(clients[ranks], ranks=ranks, on_record=interrupt, overrides=slow)
    assert step <= story.summary["steps"] <= 18
    assert_same_end(chaos, clients[ranks], story, uninterrupted(clients[ranks], ranks), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", TWO_AND_FOUR)
def test_an_interrupt_during_validation_saves_and_a_resume_validates_first(chaos, clients, uninterrupted, ranks):
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


@pytest.mark.slow
def test_a_paused_job_ends_well_and_a_resume_comes_to_the_same_end(cli, client2, uninterrupted):
    run, resumed = cli.folder / "run", cli.folder / "resumed"
    settings = (*SETTINGS, "data.batch_size=8", f"hydra.run.dir={run}", "trainer.pause_after_validations=1")
    assert "go on with resume=run" in cli.done(*settings).stdout
    assert Story(run).summary["status"] == "paused"
    cli.done("resume=run", f"hydra.run.dir={resumed}")
    assert_same(Story(resumed).checkpoint(), uninterrupted(client2, 2).checkpoint())


@pytest.mark.slow
def test_the_command_line_says_130_at_a_time_limit_and_resumes_to_the_same_end(cli, client2, uninterrupted):
    run, resumed = cli.folder / "run", cli.folder / "resumed"
    settings = (*SETTINGS, "data.batch_size=8", f"hydra.run.dir={run}")
    ended = cli.run(*settings, "data.delay_s=0.02", "trainer.time_limit_s=0.4")
    assert (ended.returncode, "Traceback" in ended.stderr) == (130, False), ended.stderr
    assert "go on with resume=run" in ended.stderr
    cli.done("resume=run", "data.delay_s=0", "trainer.time_limit_s=null", f"hydra.run.dir={resumed}")
    assert_same(Story(resumed).checkpoint(), uninterrupted(client2, 2).checkpoint())


# -- machines that go away ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_machines(warm_server, tmp_path_factory) -> Iterator[tuple[Dask, Client]]:
    """Each worker with a nanny of its own, as `dask worker` starts them; what ends does not come back by itself."""
    with dask(tmp_path_factory.mktemp("machines"), 3) as (cluster, client):
        yield cluster, client


@pytest.fixture
def machines(three_machines) -> tuple[Dask, Client]:
    """All of them there."""
    cluster, client = three_machines
    cluster.heal(client)
    return cluster, client


def program_of(machines: tuple[Dask, Client], story: Story, rank: int) -> psutil.Process:
    """The program that a rank's worker belongs to. It takes a while to find, in which a hang keeps the rank."""
    worker = story.gang.attempt.specs[rank].worker
    return psutil.Process(machines[1].run(os.getppid, workers=[worker])[worker])


@pytest.mark.slow
def test_a_worker_that_is_lost_for_good_is_done_without(chaos, machines, clients, uninterrupted, caplog):
    """The global batch stays 24, and the samples come in the same order."""
    _, client = machines
    settings = ("data.batch_size=8", "model.tell=true")
    fewer = ("dispatch.min_ranks=2", "dispatch.restart_wait_s=0.5")
    whole = uninterrupted(clients[4], 3, *settings, "model.dropout=0", *SLOW)

    def kill(record: Record) -> None:
        if record.kind == "metrics" and (record.step, record.attempt) == (5, 0):
            signal_all(program_of(machines, chaos.stories[-1], 2), signal.SIGKILL)

    overrides = (*settings, "model.dropout=0", *fewer, *SLOW)
    story = chaos.done(client, "hang,rank=2,step=7", ranks=3, on_record=kill, overrides=overrides)
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
def test_a_global_batch_that_does_not_divide_is_said_to_change(chaos, machines, caplog):
    _, client = machines
    fewer = ("dispatch.min_ranks=2", "dispatch.restart_wait_s=0.5", "data.batch_size=5")

    def kill(record: Record) -> None:
        if record.kind == "metrics" and (record.step, record.attempt) == (5, 0):
            signal_all(program_of(machines, chaos.stories[-1], 2), signal.SIGKILL)

    story = chaos.done(client, "hang,rank=2,step=7", ranks=3, on_record=kill, overrides=(*SLOW, *fewer))
    assert {failure.kind for failure in story.failures} == {"lost"}
    assert "2 ranks instead of 3: a global batch of 15 does not divide among them" in caplog.text
    assert "so it is 10 now, with data.batch_size=5" in caplog.text
    assert (story.summary["status"], story.summary["world_size"]) == ("done", 2)


@pytest.mark.slow
def test_fewer_ranks_than_allowed_end_the_job_with_what_to_do(chaos, machines):
    _, client = machines

    def kill(record: Record) -> None:
        if record.kind == "metrics" and (record.step, record.attempt) == (5, 0):
            signal_all(program_of(machines, chaos.stories[-1], 2), signal.SIGKILL)

    overrides = (*SLOW, "dispatch.restart_wait_s=0.5")
    story = chaos(client, "hang,rank=2,step=7", ranks=3, on_record=kill, overrides=overrides)
    assert isinstance(story.error, RankFailed)
    assert "2 of 3 workers are there, fewer than 3" in str(story.error)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", slow("save")])
def test_a_killed_nanny_takes_its_rank_along_and_a_spare_worker_takes_over(
    chaos, machines, clients, uninterrupted, place
):
    _, client = machines
    story = chaos.done(client, f"nanny,rank=1,step=8,at={place}", overrides=SLOW)
    (failure,) = story.failures
    assert (failure.kind, failure.rank) == ("lost", 1)
    assert_same(story.checkpoint(), uninterrupted(clients[2], 2).checkpoint())


@pytest.mark.slow
@pytest.mark.parametrize(("step", "place", "ranks"), [(9, "forward", 2), slow(8, "save", 2), slow(12, "validate", 2)])
def test_sigterm_to_a_dask_worker_saves_at_the_next_step(chaos, machines, clients, uninterrupted, step, place, ranks):
    """Sent to the nanny, as by a batch system that ends a job step."""
    cluster, client = machines
    slow = (*SLOW, f"data.delay_s={0.02 * ranks}")
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
