from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.test import Client

from ddp_hydra.tensorboard import run_list
from ddp_hydra.tensorboard.plugin import RunsPlugin
from tests.ddp_hydra.runs.conftest import hydra_files as hydra_files
from tests.ddp_hydra.runs.conftest import make_run as make_run
from tests.ddp_hydra.runs.conftest import own_cache as own_cache
from tests.ddp_hydra.runs.conftest import process_of as process_of
from tests.support.s3_server import credentials as credentials
from tests.support.s3_server import s3 as s3


class Asked:
    """The plugin, asked as the page does."""

    def __init__(self, logdir: str = "", spec: str = "") -> None:
        self.plugin = RunsPlugin(SimpleNamespace(logdir=logdir, flags=SimpleNamespace(logdir_spec=spec)))
        self.apps = self.plugin.get_plugin_apps()

    def response(self, route: str, method: str = "GET", **query: Any) -> Any:
        return Client(self.apps[route]).open(route, method=method, query_string=query)

    def __call__(self, route: str, **query: Any) -> Any:
        response = self.response(route, **query)
        assert response.status_code == 200, response.text
        return response.json

    def ids(self) -> dict[str, str]:
        return {row["name"]: row["id"] for row in self("/runs")["rows"]}


@pytest.fixture
def ask(tmp_path, monkeypatch) -> Callable[..., Asked]:
    """Return the plugin over a folder; each request looks at all runs again."""
    monkeypatch.setattr(run_list, "SHORTEST_PAUSE_S", 0.0)
    monkeypatch.setattr(run_list, "PAUSE_FACTOR", 0)
    return lambda logdir=str(tmp_path / "outputs"), spec="": Asked(logdir, spec)
