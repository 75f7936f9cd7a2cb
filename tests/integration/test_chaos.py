"""Each fault, on 2 and 4 ranks, at each moment: named, stopped in time, cleaned up, and survived without a difference.

A fault is injected the way users rehearse theirs, with the config key `faults`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed import Client

from ddp_hydra.errors import RankFailed
from ddp_hydra.record import Record
from tests.integration.support.chaos import Chaos, Story, assert_same, dask

pytestmark = pytest.mark.integration


def slow(*values: Any) -> Any:
    """Make a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


TWO_AND_FOUR = [2, slow(4)]


IMPATIENT = ("dispatch.hang_timeout_s=15", "dispatch.first_step_timeout_s=60")
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

QUICK = {("kill", "checkpoint's file", 2), ("hang", "checkpoint", 2), ("worker", "mid-epoch", 2)}
"""Each way to hear of a failure once; the others are slow. test_failures.py has ranks that raise and exit."""

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


# -- no false alarms ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_validation_longer_than_the_timeout_is_no_hang(chaos, client2, uninterrupted):
    """Each of a rank's 19 samples takes its time; two batches are read at once."""
    settings = ("trainer.epochs=2", "trainer.validate_every_epochs=2", "dispatch.hang_timeout_s=15")
    story = chaos.done(client2, overrides=(*settings, "+data.val.delay_s=2.4"))
    assert story.over == []
    assert_same(story.checkpoint(), uninterrupted(client2, 2, *settings).checkpoint())


@pytest.mark.slow
def test_a_client_that_takes_its_time_for_checkpoints_is_no_hang(chaos, client2, uninterrupted):
    """Rank 0 waits for room in its spool, and the others for rank 0."""
    settings = ("trainer.checkpoint_every_steps=1", "results.keep_checkpoints=20", "dispatch.hang_timeout_s=15")

    def take_time(record: Record) -> None:
        if record.kind == "file":
            time.sleep(30.0 if record.step == 1 else 0.1)

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
