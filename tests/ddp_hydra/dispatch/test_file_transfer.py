from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.dispatch import workers
from ddp_hydra.dispatch.workers import WorkerCaller
from ddp_hydra.rank import outbox
from ddp_hydra.record import File

NOBODY = 65534


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """This process cannot look into the folder."""
    folder.chmod(0)
    me = os.geteuid()
    if me == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)
        folder.chmod(0o700)


def test_a_worker_of_another_user_on_this_host_is_asked_for_its_files(tmp_path):
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "1").write_bytes(b"abc")
    assert workers._is_here(folder / "1", 3)
    with closed(folder):
        assert not workers._is_here(folder / "1", 3)


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """A busy machine reaches its workers, too."""
    monkeypatch.setattr(workers, "REACH_S", 60.0)


@pytest.fixture
def asked(client2, monkeypatch) -> list[str]:
    """What the scheduler is asked to pass on to workers."""
    passed_on, run = [], client2._run

    async def noted(function: Any, *args: Any, **options: Any) -> Any:
        passed_on.append(function.__name__)
        return await run(function, *args, **options)

    monkeypatch.setattr(client2, "_run", noted)
    return passed_on


@pytest.fixture
def worker(client2) -> str:
    return str(next(iter(workers_of(client2))))


def in_outbox(client: Client, worker: str, content: bytes) -> Path:
    def put(dask_worker: Any) -> str:
        path = outbox.folder(dask_worker, "direct", 0) / "file"
        path.write_bytes(content)
        return str(path)

    return Path(client.run(put, workers=[worker])[worker])


@pytest.fixture
def other_host(client2, monkeypatch) -> Iterator[None]:
    """This process sees no file of the worker."""
    monkeypatch.setattr(workers, "_is_here", lambda *_: False)
    monkeypatch.setattr(outbox, "CHUNK_BYTES", 1000)
    yield
    client2.run(outbox.clear, "direct")


@pytest.fixture
def unreachable() -> Iterator[str]:
    """An address at which somebody listens and never answers, as behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.integration
@pytest.mark.usefixtures("other_host")
@pytest.mark.parametrize("shares_disk", [True, False])
def test_a_file_comes_directly_from_a_worker_that_is_reached(client2, worker, asked, tmp_path, shares_disk):
    """In pieces, or the worker writes it where both see it."""
    content = os.urandom(2500)
    source, file = in_outbox(client2, worker, content), File("a/b", 2500, hashlib.sha256(content).hexdigest())
    caller = WorkerCaller(client2)
    asked.clear()
    called = []

    def call(function: Any, *args: Any) -> Any:
        called.append(function.__name__)
        there = ("/not/there", *args[1:]) if function is outbox.sees and not shares_disk else args
        return caller.call(worker, function, "direct", 0, *there)

    workers.fetch(source, file, tmp_path / "got", call)
    assert called == ["sees", "copy" if shares_disk else "read", "remove"]
    assert (tmp_path / "got").read_bytes() == content
    assert not source.exists()
    assert asked == []
    assert caller.reached == {worker: True}


@pytest.mark.integration
def test_what_a_function_raises_there_is_raised_here(client2, worker, asked):
    caller = WorkerCaller(client2)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            caller.call(worker, outbox.read, "none", 0, "file", 0)
    assert asked == ["read", "read"]
    assert caller.reached == {worker: True}


@pytest.mark.integration
@pytest.mark.usefixtures("other_host")
def test_a_worker_that_is_not_reached_is_asked_through_the_scheduler(
    client2, worker, asked, unreachable, monkeypatch, tmp_path
):
    monkeypatch.setattr(workers, "REACH_S", 0.3)
    ask = workers.ask
    monkeypatch.setattr(workers, "ask", lambda client, address, *given: ask(client, unreachable, *given))
    source = in_outbox(client2, worker, b"abc")
    caller = WorkerCaller(client2)
    asked.clear()
    call = partial(caller.call, worker)
    workers.fetch(source, File("a/b", 3, ""), tmp_path / "got", lambda f, *args: call(f, "direct", 0, *args))
    assert (tmp_path / "got").read_bytes() == b"abc"
    assert asked == ["read", "remove"]
    assert caller.reached == {worker: False}


@pytest.mark.integration
def test_another_worker_that_answers_at_the_address_is_not_the_one(client2, asked, monkeypatch):
    """A client behind a forwarded port may have another cluster in its own network."""
    one, other = workers_of(client2)
    ask = workers.ask
    monkeypatch.setattr(workers, "ask", lambda client, address, *given: ask(client, other, *given))
    caller = WorkerCaller(client2)
    assert caller.call(one, outbox.local_directory) != caller.call(other, outbox.local_directory)
    assert asked == ["local_directory"]
    assert caller.reached == {one: False, other: True}


@pytest.mark.integration
def test_a_connection_that_breaks_is_replaced_by_the_scheduler(client2, worker, asked, monkeypatch):
    caller = WorkerCaller(client2)
    assert caller.reaches(worker)

    async def broken(*_: Any) -> None:
        raise OSError("closed")

    monkeypatch.setattr(workers, "ask", broken)
    assert caller.call(worker, outbox.local_directory)
    assert asked == ["local_directory"]
    assert caller.reached == {worker: False}


@pytest.mark.integration
def test_a_worker_that_is_lost_is_not_waited_for(client2, worker, monkeypatch):
    lost = threading.Event()
    caller = WorkerCaller(client2)
    assert caller.reaches(worker)

    async def stuck(*_: Any) -> None:
        lost.set()
        await asyncio.sleep(1000)

    monkeypatch.setattr(workers, "ask", stuck)
    with pytest.raises(workers.WorkerSilent, match="is lost"):
        caller.call(worker, outbox.local_directory, is_lost=lost.is_set)


@pytest.mark.integration
@pytest.mark.usefixtures("other_host")
def test_a_folder_is_sent_whole(client2, worker, asked, tmp_path, monkeypatch):
    folder = tmp_path / "step-000001"
    folder.mkdir()
    contents = {"state.pt": os.urandom(2500), "rank-1.pt": b"", "rank-2.pt": b"another"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    caller = WorkerCaller(client2)
    assert workers.send(caller, worker, "direct", 0, folder) == str(folder), "the host sees it"
    monkeypatch.setattr(outbox, "is_same_file", not_the_same)
    sent = Path(workers.send(caller, worker, "direct", 0, folder))
    assert (sent.name, sent.parent.name) == ("step-000001", "in")
    assert {path.name: path.read_bytes() for path in sent.iterdir()} == contents
    single = Path(workers.send(caller, worker, "direct", 0, folder / "state.pt"))
    assert (single.parent, single.read_bytes()) == (sent.parent, contents["state.pt"])
    assert asked == []


def not_the_same(*_: Any) -> bool:
    return False
