"""The plugin that TensorBoard loads by the entry point `tensorboard_plugins`.

TensorBoard imports this module each time it starts, so it imports what lists runs only where it is used.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError

if TYPE_CHECKING:
    from ddp_hydra.tensorboard.run_list import RunList

NAME = "ddp_hydra"
TYPES = {".js": "text/javascript", ".css": "text/css"}
POLICY = "default-src 'none'; frame-ancestors 'none'"
HEADERS = [
    ("Content-Security-Policy", POLICY),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
]
MOST_COMPARED = 8
LOOK_S = 0.5
"""TensorBoard waits so long at most for the answer whether there are runs."""
LOOK_AGAIN_S = 5.0
App = Callable[..., Any]


class BadRequestError(ValueError):
    """A request asks for what the page never asks for."""


class RunsPlugin(base_plugin.TBPlugin):
    """The tab *Runs*."""

    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self.roots = roots_of(context.logdir, getattr(context.flags, "logdir_spec", None))
        self._has_runs = False
        self._looking: threading.Thread | None = None
        self._starting = threading.Lock()
        self._looked = 0.0

    @functools.cached_property
    def runs(self) -> RunList:
        from ddp_hydra.tensorboard.run_list import RunList

        return RunList(self.roots)

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and the module that draws it. It refreshes by itself."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Runs", disable_reload=True)

    def is_active(self) -> bool:
        """Return whether there is a run. TensorBoard asks often, so it never waits long, nor fails."""
        looking = self._start_to_look()
        if not self._has_runs and looking is not None:
            looking.join(LOOK_S)
        return self._has_runs

    def _start_to_look(self) -> threading.Thread | None:
        """Return the thread that looks, if there is one."""
        with self._starting:  # TensorBoard answers each request in a thread of its own
            if self._has_runs or not self.roots or self._looking is not None:
                return self._looking
            if self._looked and time.monotonic() - self._looked <= LOOK_AGAIN_S:
                return None
            self._looking = looking = threading.Thread(target=self._look, name="ddp_hydra-runs", daemon=True)
            try:
                looking.start()
            except RuntimeError:  # the host allows no other thread
                self._looking = None
                return None
            return looking

    def _look(self) -> None:
        from ddp_hydra.runs import find
        from ddp_hydra.storage import urls

        try:
            for root in self.roots.values():
                found = find.stored_runs(root) if urls.is_url(root) else find.run_dirs(root)
                if next(iter(found), None) is not None:
                    self._has_runs = True
                    return
        except (ConfigError, OSError):  # TensorBoard has its own sentence for a store that does not answer
            pass
        finally:
            self._looked, self._looking = time.monotonic(), None

    def get_plugin_apps(self) -> dict[str, App]:
        """Return the answer to each address: the files of the page, and JSON."""
        self._start_to_look()  # so that the answer is there when the browser asks
        answers: dict[str, Callable[[wrappers.Request], Mapping[str, Any]]] = {
            "/runs": self._runs,
            "/run": lambda request: self.runs.details(request.args.get("id", "")),
            "/log": lambda request: self.runs.log(request.args.get("id", ""), _count(request.args.get("rank", "0"))),
            "/diff": self._diff,
        }
        apps: dict[str, App] = {route: _json_app(answer) for route, answer in answers.items()}
        for file in resources.files(__package__).joinpath("page").iterdir():
            if (kind := TYPES.get(Path(file.name).suffix)) is not None:
                apps[f"/{file.name}"] = _file_app(file.read_bytes(), kind)
        return apps

    def _runs(self, request: wrappers.Request) -> Mapping[str, Any]:
        args = request.args
        return self.runs.changes(args.get("instance", ""), _count(args.get("since", "0")), args.get("filter", ""))

    def _diff(self, request: wrappers.Request) -> Mapping[str, Any]:
        keys = list(dict.fromkeys(request.args.getlist("id")))
        if not 2 <= len(keys) <= MOST_COMPARED:
            raise BadRequestError(f"{len(keys)} runs: 2 to {MOST_COMPARED} runs are compared")
        return self.runs.comparison(keys)


def roots_of(logdir: str | None, spec: str | None) -> dict[str, str]:
    """Return the folders and URLs of `--logdir` or `--logdir_spec` ("name:folder,folder"), by their names there."""
    if logdir:
        return {"": str(expanded(logdir)) if "://" not in logdir else logdir}
    found = {}
    for word in filter(None, (spec or "").split(",")):
        name, colon, place = word.partition(":")
        if not colon or place.startswith("//") or "/" in name:
            name, place = word, word
        found[name.strip("/")] = str(expanded(place)) if "://" not in place else place
    return found


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) < 16):
        raise BadRequestError(f"{word[:20]!r} is not a count")
    return int(word)


def _json_app(answer: Callable[[wrappers.Request], Mapping[str, Any]]) -> App:
    @wrappers.Request.application
    def app(request: wrappers.Request) -> wrappers.Response:
        from ddp_hydra.tensorboard.run_list import NoSuchRunError

        if request.method not in ("GET", "HEAD"):
            return _respond(request, {"error": "nothing can be changed here"}, 405)
        try:
            return _respond(request, answer(request))
        except NoSuchRunError:
            return _respond(request, {"error": "there is no such run, or no more"}, 404)
        except (ConfigError, BadRequestError) as error:
            return _respond(request, {"error": str(error)}, 400)

    return app


def _respond(request: wrappers.Request, content: Mapping[str, Any], code: int = 200) -> wrappers.Response:
    encoded = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return http_util.Respond(request, encoded, "application/json", code, headers=HEADERS)


def _file_app(content: bytes, kind: str) -> App:
    @wrappers.Request.application
    def app(request: wrappers.Request) -> wrappers.Response:
        return http_util.Respond(request, content, kind, headers=HEADERS)

    return app
