"""dispatch.run with a run directory, and dispatch.start: what a user's own function leaves, and how it is stopped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
import torch.distributed as dist
from distributed import Client

from ddp_hydra import dispatch, results
from ddp_hydra.compat.dask_pytorch_ddp import dispatch as dask_pytorch_ddp
from ddp_hydra.dispatch.attempt import LOOP_START_S
from ddp_hydra.errors import ConfigError, RankFailed
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.record import Checkpoint
from ddp_hydra.storage.manifest import find_checkpoint, read_manifest
from ddp_hydra.training import sharded_checkpoint
from ddp_hydra.training.checkpoint import CheckpointSaver, read
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.state import Position, TrainingState
from tests.integration.support.training import summary_of
from tests.support.interrupts import interrupt_once_waiting

pytestmark = pytest.mark.integration


def train(steps: int = 6):
    """What users write: metrics, a checkpoint now and then, files and pictures."""
    rank, model = dist.get_rank(), torch.nn.Linear(2, 1)
    print(f"rank {rank} trains")
    for step in range(1, steps + 1):
        if rank == 0:
            results.log({"loss": torch.tensor(1.0 / step)}, step=step, epoch=1)
            results.submit(f"samples/step-{step}.txt", f"step {step}")
        if rank == 0 and step % 2 == 0:
            results.checkpoint({"model": model.state_dict(), "step": step}, step, metrics={"loss": 1 / step}, best=True)
    results.submit(f"weights/rank-{rank}.bin", bytes(100_000))
    results.text("note", "**done**", step=steps)
    return rank


@in_world
def save(world: World, run: Path, deadly_step: int) -> int:
    """Save after each of three steps, a part on each rank; rank 1 dies once, when a part of rank 0 has arrived."""
    folder, fatal = run / "checkpoints", run / "was killed"
    begun = read(find_checkpoint(run))["position"]["step"] if fatal.exists() else 0
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = TrainingState(Parallel().adopt(model), optimizer, schedule, Position(begun), {})

    submit = results.submit_file

    def submit_or_die(path: str, write: Callable[[Path], Any], step: int, checkpoint: Checkpoint) -> None:
        if world.rank == 1 and step == deadly_step and not fatal.exists():
            while not list(folder.glob(".part-*/state.pt")):
                time.sleep(0.01)
            fatal.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        submit(path, write, step, checkpoint)

    results.submit_file = submit_or_die
    saver = CheckpointSaver(world, shard_above_gb=0)
    for _ in range(begun, 3):
        state.position.advance(1)
        saver.save(state, {"loss": 0.5} if world.rank == 0 else {}, best=False)
        saver.wait()
    return begun


@in_world
def restored(world: World) -> list[str]:
    """Resume from one file, and tell what else was imported for that."""
    before = set(sys.modules)
    strided = torch.arange(6.0).reshape(2, 3).t()
    sent = sharded_checkpoint.send(lambda: {"model": {"weight": strided}, "steps": 3}, world)
    found = sharded_checkpoint.with_parts(sent, world, lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
    assert found["steps"] == 3
    assert torch.equal(found["model"]["weight"], strided)
    return sorted(name for name in set(sys.modules) - before if not name.startswith("ddp_hydra"))


def test_a_restart_waits_for_no_imports(client2):
    assert dispatch.run(client2, restored) == [[], []]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_checkpoint_of_two_ranks_is_there_with_both_parts_or_not_at_all(client2, tmp_path, restarts):
    folder = tmp_path / "checkpoints"
    gang = dispatch.Gang(client2, run_dir=tmp_path, max_restarts=restarts)
    if restarts:
        assert gang.run(save, tmp_path, 2) == [1, 1]
    else:
        with pytest.raises(RankFailed, match="rank 1"):
            gang.run(save, tmp_path, 2)
    last = 3 if restarts else 1
    steps = [f"step-{step:06d}" for step in range(1, last + 1)]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *steps]
    entries = read_manifest(folder)
    assert set(entries) == {*steps, "last.pt"}
    parts = [(".metadata", 0), ("__0_0.distcp", 0), ("__1_0.distcp", 1), ("state.pt", 0)]
    assert [(part.name, part.rank) for part in entries["last.pt"].parts] == parts
    assert entries["last.pt"].metrics == {"loss": 0.5}
    assert find_checkpoint(tmp_path) == folder / steps[-1]
    assert read(find_checkpoint(tmp_path))["position"]["step"] == last
    assert read(find_checkpoint(tmp_path))["model"].keys() == {"weight", "bias"}


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_directory_gets_all_that_a_job_leaves_and_is_not_mixed_with_another(client2, tmp_path, heard):
    run_dir = tmp_path / "runs" / "mine"
    assert dispatch.Gang(client2, run_dir=run_dir, on_record=heard).run(train) == [0, 1]
    assert heard.texts("note") == {0: "**done**", 1: "**done**"}
    assert [(line["step"], line["loss"], line["epoch"]) for line in lines(run_dir)] == [
        (step, pytest.approx(1 / step), 1) for step in range(1, 7)
    ]
    assert (run_dir / "samples" / "step-6.txt").read_text() == "step 6"
    assert [(run_dir / "weights" / f"rank-{rank}.bin").stat().st_size for rank in (0, 1)] == [100_000] * 2
    assert "rank 1 trains" in (run_dir / "logs" / "rank-1.log").read_text()
    assert list((run_dir / "tensorboard").glob("events*"))
    saved = read_manifest(run_dir / "checkpoints")
    assert set(saved) == {"step-000002.pt", "step-000004.pt", "step-000006.pt", "last.pt", "best.pt"}
    assert saved["best.pt"].metrics == {"loss": pytest.approx(1 / 6)}
    assert torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)["step"] == 6
    ended = summary_of(run_dir)
    assert (ended["status"], ended["steps"], ended["world_size"], ended["restarts"]) == ("done", 6, 2, 0)
    assert not {".lock", "status.json"} & {path.name for path in run_dir.iterdir()}
    with pytest.raises(ConfigError, match=r"holds a run that is done.*run_dir=<folder>"):
        dispatch.run(client2, train, 1, run_dir=run_dir)
    assert summary_of(run_dir) == ended


def test_a_failure_is_in_the_summary_and_the_same_folder_may_be_given_again(client2, tmp_path):
    def fail():
        results.log({"loss": 2.0}, step=1)
        results.log({"loss": 1.0}, step=2)
        dist.barrier()  # the first rank that fails ends the other one, which has logged by then
        raise OSError("no data")

    with pytest.raises(RankFailed, match="no data"):
        dispatch.run(client2, fail, run_dir=tmp_path)
    failed = summary_of(tmp_path)
    assert (failed["status"], failed["failure"]["message"]) == ("failed", "OSError: no data")

    def go_on():
        if dist.get_rank() == 0:
            results.log({"loss": 0.5}, step=2)

    dispatch.run(client2, go_on, run_dir=tmp_path)
    assert [(line["step"], line["attempt"]) for line in lines(tmp_path) if not line.get("rank")] == [(1, 0), (2, 1)]
    assert summary_of(tmp_path)["status"] == "done"


def test_after_a_restart_each_step_is_in_the_file_once(client2, tmp_path):
    def train(marker):
        begin = 3 if Path(marker).exists() else 1
        for step in range(begin, 6):
            if dist.get_rank() == 0:
                results.log({"loss": float(begin)}, step=step)
            dist.barrier()
            if begin == 1 and step == 4:
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return json.loads((Path(marker).parent / "run" / "status.json").read_text())

    gang = dispatch.Gang(client2, run_dir=tmp_path / "run", max_restarts=1)
    told = gang.run(train, str(tmp_path / "marker"))[0]
    assert (told["attempt"], told["world_size"], [one["attempt"] for one in told["attempts"]]) == (1, 2, [0])
    found = [(line["step"], line["loss"], line["attempt"]) for line in lines(tmp_path / "run")]
    assert found == [(1, 1.0, 0), (2, 1.0, 0), (3, 3.0, 1), (4, 3.0, 1), (5, 3.0, 1)]
    assert summary_of(tmp_path / "run")["restarts"] == 1


def test_a_script_is_shown_and_written(client2, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('50%', end='\\r')\nprint('I am', os.environ['RANK'])\n")
    dispatch.Gang(client2, run_dir=tmp_path / "run").run(dispatch.script(script))
    said = capsys.readouterr().out
    assert "50%\rI am 0\n" in said, "a progress bar is one line"
    assert "I am 1" not in said
    assert "I am 1" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_a_checkpoint_that_weights_only_would_refuse_is_refused_when_it_is_saved(client2, tmp_path):
    def save():
        results.checkpoint({"model": Path("x")}, 1)

    with pytest.raises(RankFailed, match=r"checkpoint of step 1 holds more than tensors.*state_dict"):
        dispatch.run(client2, save, run_dir=tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["restarts"], len(summary["attempts"])) == ("failed", 0, 1)


def takes_its_own(rate, run_dir=None, backend=None):
    return rate, run_dir, backend


def test_arguments_that_the_function_does_not_take_are_refused_before_it_starts(client2):
    with pytest.raises(ConfigError, match=r"train can't be called.*'lr'; train\(steps: .*\) is what it takes"):
        dispatch.run(client2, train, lr=0.1)
    with pytest.raises(
        ConfigError, match=r"dispatch\.Gang\(client, ranks=\.\.\., backend=\.\.\.\)\.run\(train, \.\.\.\)"
    ):
        dispatch.start(client2, train, ranks=1, backend="gloo")


def test_what_is_no_function_is_refused(client2):
    with pytest.raises(ConfigError, match=r"^3 can't be called: give a function"):
        dispatch.run(client2, 3)


def value_of(lazy: Any, other: Any):
    return lazy.compute(scheduler="synchronous")


@pytest.mark.parametrize(
    "at", [lambda value: ((value,), {}), lambda value: (([{"a": (value,)}],), {}), lambda value: ((), {"x": value})]
)
def test_what_ranks_cannot_read_of_dask_is_refused(client2, at):
    args, kwargs = at(client2.submit(int, 3))
    for run in (dispatch.run, dispatch.start, dask_pytorch_ddp.run):
        with pytest.raises(ConfigError, match=r"a Dask future.*future\.result\(\)"):
            run(client2, print, *args, **kwargs)
    holds_itself: dict[str, Any] = {}
    holds_itself["self"] = holds_itself
    assert dispatch.run(client2, value_of, dask.delayed(sum)([1, 2]), holds_itself) == [3, 3], "lazy ones may be sent"


def test_a_client_that_is_closed_or_asynchronous_or_none_is_refused(client2):
    address = client2.scheduler.address

    async def run() -> None:
        async with Client(address, asynchronous=True) as client:
            with pytest.raises(ConfigError, match=r"asynchronous.*asyncio\.to_thread"):
                dispatch.run(client, dist_rank)

    asyncio.run(run())
    client = Client(address)
    client.close()
    for given, said in ((client, "closed"), (address, rf"Client\('{address}'\)"), (None, r"Client\(cluster\)")):
        for start in (dispatch.run, dispatch.start, dask_pytorch_ddp.run):
            with pytest.raises(ConfigError, match=said):
                start(given, dist_rank)


def test_what_cannot_be_pickled_ends_the_gang_at_once(client2):
    lock = threading.Lock()
    for call, named in (
        ((print, lock), r"argument 1 \(a lock\)"),
        ((lambda: lock,), r"lock \(a lock\), which <lambda>\(\) uses,"),
    ):
        with pytest.raises(ConfigError, match=rf"^{named} can't be sent to the ranks .*cannot pickle"):
            dispatch.run(client2, *call)
    with pytest.raises(ConfigError, match=r"^the argument file \(a TextIOWrapper\) can't be sent"):
        dispatch.run(client2, print, file=sys.__stdout__)
    assert dispatch.run(client2, dist_rank) == [0, 1]


def test_the_functions_own_parameters_are_its_own(client2, tmp_path):
    assert dispatch.run(client2, takes_its_own, 1, backend="b") == [(1, None, "b")] * 2
    with pytest.raises(ConfigError, match=r"has a parameter run_dir, too: .*Gang\(client, run_dir=<folder>\)"):
        dispatch.run(client2, takes_its_own, 1, run_dir=str(tmp_path))
    gang = dispatch.Gang(client2, run_dir=tmp_path, ranks=1)
    assert gang.run(takes_its_own, 1, run_dir="its own") == [(1, "its own", None)]
    assert summary_of(tmp_path)["status"] == "done"


def test_a_url_is_no_run_directory(client2):
    with pytest.raises(ConfigError, match=r"run_dir='s3://bucket/run' is a URL"):
        dispatch.run(client2, train, run_dir="s3://bucket/run")


# -- in the background -----------------------------------------------------------------------------------------


def test_a_gang_runs_in_the_background(client2, tmp_path):
    gate = tmp_path / "gate"

    def wait(gate):
        while not Path(gate).exists():
            time.sleep(0.01)
        return dist.get_rank()

    running = dispatch.start(client2, wait, str(gate))
    assert not running.done()
    assert [future.done() for future in running.futures] == [False, False]
    with pytest.raises(TimeoutError, match=r"not ended after 0\.1 s; they go on"):
        running.result(timeout=0.1)
    gate.touch()
    assert running.result() == [0, 1]
    assert running.exception() is None
    assert running.done()
    assert not running.cancel()
    done, _ = concurrent.futures.wait(running.futures)
    assert sorted(future.result() for future in done) == [0, 1]


def test_what_a_rank_raises_is_raised_by_each_future(client2, caplog):
    def fail():
        raise ValueError("wrong")

    running = dispatch.start(client2, fail)
    with pytest.raises(RankFailed, match="wrong"):
        running.result()
    assert all(isinstance(future.exception(), RankFailed) for future in running.futures)
    assert "the ranks have failed" in caplog.text


def test_a_gang_is_cancelled(client2, tmp_path, ranks_alive, wait_for):
    running = dispatch.start(client2, time.sleep, 600, run_dir=tmp_path)
    wait_for(ranks_alive, "ranks that run")
    assert running.futures[1].cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        running.result()
    assert [future.cancelled() for future in running.futures] == [True, True]
    assert not ranks_alive()
    assert summary_of(tmp_path)["status"] == "interrupted"
    assert dispatch.run(client2, dist_rank) == [0, 1]


def dist_rank(after_s: float = 0.0):
    time.sleep(after_s)
    return dist.get_rank()


def test_a_gang_that_waits_for_workers_is_cancelled(client2, ranks_alive, wait_for):
    first = dispatch.start(client2, time.sleep, 600)
    wait_for(ranks_alive, "ranks that run")
    second = dispatch.start(client2, dist_rank)
    assert second.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        second.result(100)
    assert not first.done()
    first.cancel()
    assert isinstance(first.exception(100), concurrent.futures.CancelledError)


@pytest.mark.parametrize("ranks_run", [False, True])
def test_one_gang_runs_once_at_a_time(client2, ranks_alive, wait_for, ranks_run):
    gang = dispatch.Gang(client2, ranks=1)
    running = gang.start(time.sleep, 600)
    with pytest.raises(ConfigError, match=r"runs already.*dispatch\.Gang\(client"):
        gang.run(dist_rank)
    if ranks_run:
        wait_for(ranks_alive, "a rank that runs")
    running.cancel()
    assert isinstance(running.exception(100), concurrent.futures.CancelledError)
    assert gang.run(dist_rank, 2 * LOOP_START_S) == [0], "it is not cancelled, too"


def test_ctrl_c_while_the_result_is_waited_for_stops_the_ranks(client2, ranks_alive, wait_for):
    running = dispatch.start(client2, time.sleep, 600)
    wait_for(ranks_alive, "ranks that run")
    with pytest.raises(KeyboardInterrupt), interrupt_once_waiting(type(running).wait):
        running.result()
    assert running.done()
    assert not ranks_alive()


OWN_NAMES = """
import io, multiprocessing, sys
import torch
from distributed import Client
from torch.utils.data import DataLoader
from ddp_hydra import dispatch

class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index)

class Net(torch.nn.Linear):
    pass

def square(x):
    return x * x

def work(how):
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=how)
    with multiprocessing.get_context(how).Pool(1) as pool:
        found = [batch.tolist() for batch in loader], pool.map(square, range(3))
    file = io.BytesIO()
    torch.save(Net(1, 1), file)
    return *found, type(torch.load(io.BytesIO(file.getvalue()), weights_only=False)) is Net

class Work:
    def __call__(self, how):
        return work(how)

if __name__ == "__main__":
    print(dispatch.run(Client(sys.argv[1]), work if sys.argv[2] == "fork" else Work(), sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_processes_of_a_function_and_files_know_the_classes_of_its_script(client2, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(OWN_NAMES)
    command = [sys.executable, str(script), client2.scheduler.address, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[([[0, 1], [2, 3]], [0, 1, 4], True)] * 2}\n"


UNWATCHED = """
import sys, time
from distributed import Client
from ddp_hydra import dispatch, results

def work():
    results.log({"loss": 1.0}, step=1)
    time.sleep(600)

if __name__ == "__main__":
    client = Client(sys.argv[1])
    running = dispatch.start(client, work, run_dir=sys.argv[2])
    while sys.argv[3] != "at once" and not (running.run_dir / "metrics.jsonl").exists():
        time.sleep(0.05)
    print("seen", flush=True)
    if sys.argv[3] == "sleep":
        time.sleep(600)
"""


@pytest.mark.parametrize("end", ["by itself", "at once", "kill"])
def test_the_end_of_the_program_stops_the_ranks(client2, tmp_path, ranks_alive, wait_for, end):
    script = tmp_path / "script.py"
    script.write_text(UNWATCHED)
    how = "sleep" if end == "kill" else end
    command = [sys.executable, str(script), client2.scheduler.address, str(tmp_path / "run"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "seen\n"
        if end == "kill":
            process.kill()
        process.wait()
    wait_for(lambda: not ranks_alive(), "no rank left")
    if end != "kill":
        assert process.returncode == 0
        assert summary_of(tmp_path / "run")["status"] == "interrupted"
