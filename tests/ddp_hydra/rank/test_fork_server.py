"""The fork server with callers of this process: what they say, and what it does where the host has no room."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import socket
import sys
import threading
import types
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch.distributed as dist

from ddp_hydra.rank import fork_client, spare_forks
from ddp_hydra.rank import fork_server as module
from ddp_hydra.rank.fork_server import ForkServer
from ddp_hydra.rank.world import joined

NOBODY = b'{"signal": 0}\n'
RANK = b'{"title": "rank"}\n'


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[ForkServer]:
    """A server in this process; what a test has patched stays so until all its callers are dropped."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        made = ForkServer(listener, tmp_path / "s")
        yield made
        for caller in list(made.callers.values()):
            made.drop(caller)
        for end in (made.selector, made.wake_r, made.wake_w):
            end.close()


def call(server: ForkServer, said: bytes, fds: tuple[int, ...] = ()) -> socket.socket:
    """Connect and say something, and have the server hear it."""
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(5)
    caller.connect(str(server.address))
    socket.send_fds(caller, [said], fds)
    server.accept()
    server.receive(list(server.callers.values())[-1])
    return caller


def test_half_a_line_blocks_nobody(server):
    with call(server, b'{"signal"') as slow, call(server, NOBODY):
        assert len(server.callers) == 2
        slow.sendall(b": 0}")  # the line goes on
        first = next(iter(server.callers.values()))
        server.receive(first)
        assert first.partial_line == b'{"signal": 0}'


@pytest.mark.parametrize(
    "said",
    [b"garbage\n", b"\xff\xfe\n", b"[1]\n", b"7\n", b'{"signal": "x"}\n{"signal": \n', b"[" * 50_000 + b"\n"],
    ids=["a word", "bytes", "a list", "a number", "half an object", "many brackets"],
)
def test_garbage_ends_the_connection_it_came_on_and_nothing_else(server, said):
    with call(server, NOBODY) as other, call(server, said) as caller:
        if len(server.callers) > 1:  # it was heard in part
            server.receive(list(server.callers.values())[-1])
        assert caller.recv(10) == b""
        assert len(server.callers) == 1
        other.sendall(NOBODY)
        server.receive(next(iter(server.callers.values())))


def test_where_its_folder_was_removed_it_leaves_without_it(server):
    """As logind does when a user has left; who had found the server before is served first."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(server.address))
        shutil.rmtree(server.address.parent)
        assert not server.leave()
    server.receive(next(iter(server.callers.values())))
    assert server.leave()


class Left(BaseException):
    """Instead of the end of this process."""


def test_it_ends_where_all_have_gone_while_it_imports(server, monkeypatch):
    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    server.leave_if_deserted()  # nobody has come yet
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(str(server.address))
        server.leave_if_deserted()
        second.connect(str(server.address))
        second.sendall(NOBODY)
        first.close()
        server.leave_if_deserted()
        assert len(server.callers) == 1
        server.leave_if_deserted()
        caller = next(iter(server.callers.values()))
        server.receive(caller)
        assert caller.partial_line == b""  # what was sent meanwhile is read now
        assert server.callers
    with pytest.raises(Left):
        server.leave_if_deserted()
    assert not server.address.exists()


def test_it_leaves_where_the_first_caller_was_killed_before_it_called_and_waits_for_one_that_has_the_lock(server):
    server.begin_waiting()
    assert server.is_idle
    assert server.is_time_over
    with fork_client.locked(server.address.parent), socket.socket(socket.AF_UNIX) as first:
        leaving = threading.Thread(target=server.leave)
        leaving.start()
        leaving.join(0.1)
        first.connect(str(server.address))
    leaving.join()
    assert server.callers
    assert server.address.exists()


def test_where_no_process_can_be_started_only_that_rank_hears_of_it(server, monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    read, write = os.pipe()
    with call(server, b'{"title": "rank"}\n', (write,)) as caller:
        os.close(write)
        assert json.loads(caller.recv(1000)) == {"refused": "[Errno 11] Resource temporarily unavailable"}
        assert len(server.callers) == 1
        caller.sendall(b'{"title": "another"}\n')  # one connection is one rank
        server.receive(next(iter(server.callers.values())))
        assert caller.recv(10) == b""
    assert os.read(read, 1) == b""  # the server has closed what it was given
    os.close(read)


def test_another_user_is_not_served(server, monkeypatch):
    monkeypatch.setattr(module, "user_of", lambda connection: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(5)
        caller.connect(str(server.address))
        server.accept()
        assert caller.recv(10) == b""
    assert not server.callers


def test_in_a_batch_job_it_stays_for_nobody(server, monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: os.getpid())
    monkeypatch.setattr(module, "kill_group", lambda pid: None)
    monkeypatch.setattr(spare_forks.Caller, "kill", lambda *_: None)
    for variable, kept in ((None, 60.0), ("SLURM_JOB_ID", 0.0)):
        if variable:
            monkeypatch.setenv(variable, "7")
        with call(server, b'{"title": "rank", "keep_warm_s": 60}\n'):
            assert server.keep_warm_s == kept
    server.ranks.clear()


def test_questions_do_not_keep_it(server):
    server.keep_warm_s = 30.0
    with call(server, b'{"status": true}\n') as caller:
        status = json.loads(caller.recv(1000))
        assert status["pid"] == os.getpid()
        assert status["ranks"] == 0
        assert 25 < status["ends_in_s"] <= 30
    since = server.idle_since
    server.receive(next(iter(server.callers.values())))
    assert not server.callers
    assert server.idle_since == since
    with call(server, b'{"stop": true}\n') as caller:
        assert json.loads(caller.recv(1000))["ends_in_s"] == 0.0
        assert server.is_time_over


def test_who_comes_after_a_change_of_the_code_waits_for_a_new_start(server, monkeypatch):
    starts, ended = [], []
    server.start_anew = lambda: starts.append(len(server.callers))
    monkeypatch.setattr(server.spares, "end", lambda: ended.append(1))
    monkeypatch.setattr(module, "are_current", lambda files: False)
    with call(server, NOBODY), call(server, NOBODY):
        assert not starts  # nothing has been served before: it has just imported all
        server.has_served = True
        with call(server, NOBODY):
            assert not starts  # ranks that run go on
    for caller in list(server.callers.values()):
        server.drop(caller)
    with call(server, NOBODY):
        assert starts == [0]
        assert ended == [1]  # forks of the old code


@pytest.fixture
def rank(server, monkeypatch) -> Iterator[socket.socket]:
    """The caller of a rank whose process is made up, and has the id 10."""
    monkeypatch.setattr(os, "fork", lambda: 10)
    monkeypatch.setattr(spare_forks.Caller, "kill", lambda *_: None)
    with call(server, RANK) as caller:
        yield caller
    server.ranks.clear()


def test_forks_are_kept_for_as_many_ranks_as_have_run_at_once(server, rank):
    assert server.spares.wanted == 1
    with call(server, RANK), call(server, NOBODY):
        assert server.spares.wanted == 2
        assert server.lacks_spares
        assert 0.0 < server.pause_s <= module.SPARES_S  # the ranks have the cores to themselves at first
    assert server.spares.wanted == 2


def test_no_fork_is_made_before_the_callers_of_ended_ranks_hang_up(server, rank):
    (caller,) = server.callers.values()
    caller.pid = None
    assert not server.lacks_spares
    server.drop(caller)
    assert server.lacks_spares


def test_no_fork_gets_the_descriptors_of_half_a_request(server, rank):
    assert server.lacks_spares
    with call(server, b'{"title"', (0,)):
        assert not server.lacks_spares


def test_a_rank_takes_a_fork_that_is_there(server, rank, monkeypatch):
    taken = []
    monkeypatch.setattr(server.spares, "take", lambda request, fds: taken.append((request, len(fds))) or 77)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked in spite of it"))
    with call(server, b'{"title": "another"}\n', (0, 1)) as caller:
        assert json.loads(caller.recv(1000)) == {"pid": 77}
    assert taken == [({"title": "another"}, 2)]
    assert 77 in server.ranks


# -- how long it stays when nobody uses it -----------------------------------------------------------------


@pytest.fixture
def idle(server) -> ForkServer:
    """One whose last connection has just ended."""
    server.keep_warm_s = 100.0
    with call(server, NOBODY):
        server.drop(next(iter(server.callers.values())))
    return server


def test_its_time_is_what_the_last_request_said(idle):
    assert 50 < idle.remaining_s <= 100
    idle.keep_warm_s = 0.0
    assert idle.is_time_over


def test_without_its_socket_it_leaves(idle):
    other = idle.address.with_name("other")
    other.touch()
    other.replace(idle.address)  # somebody else's
    assert not idle.is_found()
    assert idle.is_time_over
    idle.address.unlink()
    assert idle.is_time_over


@pytest.mark.medium
@pytest.mark.parametrize("change", ["edited", "replaced", "removed"])
def test_what_was_imported_is_out_of_date_after_a_change(tmp_path, monkeypatch, change):
    file = tmp_path / "library.py"
    file.write_text("one = 1")
    library = types.ModuleType("library_of_this_test")
    library.__file__ = str(file)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    loaded = module.loaded_files()
    assert module.are_current(loaded)
    if change == "edited":
        file.write_text("one = 1.0")
    elif change == "replaced":
        copy = tmp_path / "copy.py"
        copy.write_text("one = 2")
        copy.replace(file)
    else:
        file.unlink()
    assert not module.are_current(loaded)


# -- what it imports ----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    """A package of which one module is broken, and one imports the next."""
    folder = tmp_path / "preloaded"
    folder.mkdir()
    for name, text in (("__init__", ""), ("broken", "1 / 0"), ("one", "import preloaded.two"), ("two", "")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PRELOAD", ("preloaded.broken", "preloaded.missing", "preloaded.one"))
    monkeypatch.setattr(module, "LOOK_S", -1.0)
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_it_looks_at_the_callers_now_and_then_while_it_imports_what_there_is(package, monkeypatch):
    seen: list[set[str]] = []
    finders = list(sys.meta_path)
    module.preload(lambda: seen.append({name for name in sys.modules if name.startswith(package)}))
    assert {"preloaded.one", "preloaded.two"} <= set(sys.modules)
    assert "preloaded.broken" not in sys.modules
    assert len(seen) == 5
    assert "preloaded.one" in seen[-1]  # before the module that it imports
    assert sys.meta_path == finders
    assert gc.isenabled()
    monkeypatch.setattr(module, "LOOK_S", 60.0)
    module.preload(lambda: pytest.fail("looked"))


def test_ranks_need_not_look_for_the_backends_that_torch_has(monkeypatch):
    found: dict[str, Any] = {}
    monkeypatch.setattr(dist.Backend, "_plugins", found)
    module.register_backends()
    names = {entry.name.upper() for entry in entry_points(group="torch.distributed.backends")}
    assert set(found) == names & {"GLOO", "NCCL"}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("looked for it again"))
    with joined(dist.HashStore(), 0, 1, 1, "gloo"):
        assert dist.get_world_size() == 1


def test_a_backend_that_cannot_be_registered_is_left_to_ranks(monkeypatch):
    class Broken:
        name = "nccl"

        def load(self) -> None:
            raise ImportError(self.name)

    monkeypatch.setattr(module, "entry_points", lambda group: [Broken()])
    module.register_backends()
