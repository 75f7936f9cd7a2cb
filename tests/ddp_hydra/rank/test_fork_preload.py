from __future__ import annotations

import gc
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch.distributed as dist

from ddp_hydra.rank import fork_preload
from ddp_hydra.rank.world import joined


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    """A package of which one module is broken, and one imports the next."""
    folder = tmp_path / "preloaded"
    folder.mkdir()
    for name, text in (("__init__", ""), ("broken", "1 / 0"), ("one", "import preloaded.two"), ("two", "")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_preload, "PRELOAD", ("preloaded.broken", "preloaded.missing", "preloaded.one"))
    monkeypatch.setattr(fork_preload, "LOOK_S", -1.0)
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_it_looks_at_the_callers_while_it_imports_what_there_is(package):
    seen: list[set[str]] = []
    finders = list(sys.meta_path)
    fork_preload.preload(lambda: seen.append({name for name in sys.modules if name.startswith(package)}))
    assert {"preloaded.one", "preloaded.two"} <= set(sys.modules)
    assert "preloaded.broken" not in sys.modules
    assert len(seen) == 5
    assert "preloaded.one" in seen[-1]  # before the module that it imports
    assert sys.meta_path == finders
    assert gc.isenabled()


def test_it_does_not_look_all_the_time(package, monkeypatch):
    monkeypatch.setattr(fork_preload, "LOOK_S", 60.0)
    fork_preload.preload(lambda: pytest.fail("looked"))


def test_ranks_need_not_look_for_the_backends_that_torch_has(monkeypatch):
    found: dict[str, Any] = {}
    monkeypatch.setattr(dist.Backend, "_plugins", found)
    fork_preload.register_backends()
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

    monkeypatch.setattr(fork_preload, "entry_points", lambda group: [Broken()])
    fork_preload.register_backends()
