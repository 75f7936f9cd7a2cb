"""dask-pytorch-ddp's own test cases, on real ranks and a real store instead of mocks.

Its tests are about: what `run` submits and returns; the environment and the process group of a rank; handlers that
differ and pickle; that all results are taken, errors raised or only logged; classes, length and items of a folder.

Refused on purpose:
- `dispatch_with_ddp`, `_get_all` and `_get_results` called directly: they stand for a fixed port (23456) and for Dask's
  Pub and Sub, which are gone. What they did is tested through `run` and `process_results`.
- The client unpickles nothing that a rank returns: plain data, arrays and tensors come back, other objects are refused.
- A result with an absolute path, or one that leads out of the folder, is refused on the rank.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_hydra.compat.dask_pytorch_ddp import data, dispatch, results
from ddp_hydra.dispatch.background import Running
from ddp_hydra.errors import ConfigError, RankFailed
from tests.support.interrupts import interrupt_once_waiting
from tests.support.s3_server import credentials  # noqa: F401 (a fixture)

pytestmark = pytest.mark.integration


# -- dispatch --------------------------------------------------------------------------------------------------


def test_run_returns_a_future_for_each_worker_at_once(client4, tmp_path):
    def wait(gate):
        while not Path(gate).exists():
            time.sleep(0.01)
        return dist.get_rank()

    futures = dispatch.run(client4, wait, str(tmp_path / "gate"))
    assert [future.done() for future in futures] == [False] * 4
    (tmp_path / "gate").touch()
    assert [future.result() for future in futures] == [0, 1, 2, 3]


def test_each_rank_finds_its_environment_and_a_process_group(client2):
    def look():
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return [os.environ[name] for name in names], dist.get_rank(), dist.get_world_size(), dist.get_backend()

    first, second = (future.result() for future in dispatch.run(client2, look))
    assert first[0][:3] == ["0", "2", "127.0.0.1"]
    assert second[0][:3] == ["1", "2", "127.0.0.1"]
    assert first[0][3] == second[0][3]
    assert (first[1:], second[1:]) == ((0, 2, "gloo"), (1, 2, "gloo"))


def test_the_backend_is_chosen_by_its_argument_and_is_not_the_functions(client2):
    futures = dispatch.run(client2, lambda *args, **kwargs: (dist.get_backend(), args, kwargs), 1, backend="gloo", a=2)
    assert futures[1].result() == ("gloo", (1,), {"a": 2})


@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [(("a", [1]), {"foo": "bar"}, (("a", [1]), {"foo": "bar"}))],
)
def test_arguments_reach_the_function(client2, args, kwargs, seen):
    futures = dispatch.run(client2, lambda *args, **kwargs: (args, kwargs), *args, **kwargs)
    assert [future.result() for future in futures] == [seen, seen]


def test_the_local_rank_is_passed_where_it_is_asked_for(client2):
    def place(name, local_rank):
        return name, local_rank

    futures = dispatch.run(client2, place, "a", pass_local_rank=True)
    assert [future.result() for future in futures] == [("a", 0), ("a", 1)]
    with pytest.raises(ConfigError, match="missing a required argument: 'local_rank'"):
        dispatch.run(client2, place, "a")


# -- results ---------------------------------------------------------------------------------------------------


def test_two_handlers_differ_and_pickle():
    handler = results.DaskResultsHandler()
    assert pickle.loads(pickle.dumps(handler)).pub_sub_key == handler.pub_sub_key
    assert results.DaskResultsHandler().pub_sub_key != results.DaskResultsHandler().pub_sub_key
    assert results.DaskResultsHandler("mine").pub_sub_key == "mine"


def test_all_results_of_all_ranks_are_taken(client2, tmp_path):
    handler = results.DaskResultsHandler("any/key, any=text")

    def work():
        rank = dist.get_rank()
        for step in range(20):
            handler.submit_result(f"worker/{rank}/data-2020-11-03T12:00:{step:02}.json", json.dumps({"step": step}))
        handler.submit_result(f"logs/{rank}.bin", bytes([rank]) * 100_000)
        handler.submit_result("model.pkl", b"the same from all")

    handler.process_results(tmp_path / "out", dispatch.run(client2, work))
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    steps = {f"worker/{rank}/data-2020-11-03T12:00:{step:02}.json" for rank in (0, 1) for step in range(20)}
    assert found == steps | {"logs/0.bin", "logs/1.bin", "model.pkl"}
    assert (tmp_path / "out" / "logs" / "1.bin").read_bytes() == b"\1" * 100_000
    assert json.loads((tmp_path / "out" / "worker/1/data-2020-11-03T12:00:19.json").read_text()) == {"step": 19}


def test_results_from_before_the_call_are_taken_too_and_the_last_one_of_a_name_stays(client2, tmp_path):
    mine, other = results.DaskResultsHandler(), results.DaskResultsHandler()

    def work():
        if dist.get_rank() == 0:
            for number in range(8):
                mine.submit_result("model.pkl", bytes([number]) * 100_000)
            other.submit_result("model.pkl", "of the other handler")

    futures = dispatch.run(client2, work)
    assert [future.result() for future in futures] == [None, None]
    mine.process_results(str(tmp_path / "mine"), futures)
    other.process_results(str(tmp_path / "other"), futures)
    assert (tmp_path / "mine" / "model.pkl").read_bytes() == b"\7" * 100_000
    assert (tmp_path / "other" / "model.pkl").read_text() == "of the other handler"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.pkl"] * 2


def fail_after_a_result(handler):
    handler.submit_result(f"{dist.get_rank()}.txt", "before")
    dist.barrier()
    if dist.get_rank() == 1:
        raise OSError("hello")
    dist.barrier()


def test_errors_are_raised(client2, tmp_path):
    handler = results.DaskResultsHandler()
    with pytest.raises(RankFailed, match=r"rank 1 .*OSError: hello"):
        handler.process_results(tmp_path, dispatch.run(client2, fail_after_a_result, handler))


def test_errors_are_masked_where_it_is_asked_for(client2, tmp_path, caplog):
    handler = results.DaskResultsHandler()
    handler.process_results(tmp_path, dispatch.run(client2, fail_after_a_result, handler), raise_errors=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt"]
    logged = [one for one in caplog.records if one.name == "ddp_hydra.compat.dask_pytorch_ddp"]
    assert len(logged) == 1
    assert "OSError: hello" in logged[0].getMessage()


@pytest.mark.parametrize(
    "path", ["../out", *(pytest.param(path, marks=pytest.mark.slow) for path in ("/etc/passwd", ".hidden"))]
)
def test_a_result_stays_below_the_folder(client2, tmp_path, path):
    handler = results.DaskResultsHandler()
    with pytest.raises(RankFailed, match="give a relative path"):
        handler.process_results(tmp_path, dispatch.run(client2, handler.submit_result, path, "x"))


def test_only_futures_of_run_are_taken(client2, tmp_path):
    with pytest.raises(ConfigError, match=r"futures that dispatch\.run has returned"):
        results.DaskResultsHandler().process_results(tmp_path, [client2.submit(abs, 1)])


def test_ctrl_c_in_process_results_stops_the_ranks(client2, tmp_path, ranks_alive, wait_for):
    futures = dispatch.run(client2, time.sleep, 600)
    wait_for(ranks_alive, "ranks that run")
    with pytest.raises(KeyboardInterrupt), interrupt_once_waiting(Running.wait):
        results.DaskResultsHandler().process_results(tmp_path, futures)
    assert not ranks_alive()


def test_what_ranks_print_is_logged(client2, caplog):
    def work():
        from distributed.worker import logger

        print("printed")
        logger.info("told to the worker's log")

    with caplog.at_level("INFO", "ddp_hydra.compat.dask_pytorch_ddp"):
        [future.result() for future in dispatch.run(client2, work)]
    assert "printed" in caplog.text
    assert "told to the worker's log" in caplog.text


# -- data ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(s3, credentials, monkeypatch, png):  # noqa: F811
    """A bucket with two classes, behind the endpoint that the environment names."""
    bucket = s3.fill({"pets/all/d/a.png": png(200, 0, 0), "pets/all/c/b.png": png(0, 200, 0), "pets/all/x.txt": b"no"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    return bucket


def first_pixel(image):
    return image.getpixel((0, 0))


def test_an_image_folder_has_classes_files_and_items(folder):
    images = data.S3ImageFolder(folder, "pets/all", first_pixel, str)
    assert images.all_files == ["pets/all/c/b.png", "pets/all/d/a.png"]
    assert (images.classes, images.class_to_idx) == (["c", "d"], {"c": 0, "d": 1})
    assert images[1] == ((200, 0, 0), "1")
    images.close()
    images = data.S3ImageFolder(s3_bucket=folder, s3_prefix="pets/all")
    image, label = images[1]
    assert (len(images), image.mode, image.size, first_pixel(image), label) == (2, "RGB", (8, 8), (200, 0, 0), 1)
    images.close()


def test_a_public_bucket_needs_no_credentials(folder, s3, monkeypatch):
    s3.publish(folder)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    images = data.S3ImageFolder(folder, "pets/all", anon=True)
    assert len(images) == 2
    assert images[0][1] == 0
    images.close()
