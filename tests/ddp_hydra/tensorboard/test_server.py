"""What TensorBoard's tab Runs is told, request by request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ddp_hydra.runs import details
from ddp_hydra.sweep.rows import JobRow as SweepRow
from ddp_hydra.sweep.rows import JobState, SweepObjective
from ddp_hydra.sweep.summary_files import json_text
from ddp_hydra.tensorboard import run_list
from ddp_hydra.tensorboard.plugin import RunsPlugin, roots_of
from tests.ddp_hydra.runs.conftest import kill
from tests.support.warm_server import wait_for

pytestmark = pytest.mark.medium

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J\u202e"


def test_tensorboard_finds_the_plugin():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (plugin,) = project["entry-points"]["tensorboard_plugins"].values()
    assert EntryPoint("", plugin, "").load() is RunsPlugin


@pytest.mark.integration
def test_loading_it_imports_nothing_heavy():
    script = (
        "import sys, ddp_hydra.tensorboard.plugin as p; p.RunsPlugin\n"
        "print([name for name in ('torch', 'distributed', 'dask', 'hydra', 'omegaconf', 'yaml', 'ddp_hydra.runs.find')"
        " if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_it_is_active_where_there_are_runs(ask, make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_hydra.tensorboard.plugin.LOOK_S", 60.0)
    for folder in ("nothing", "no_such/x"):
        assert not ask(str(tmp_path / folder)).plugin.is_active()
    assert not ask("").plugin.is_active()
    assert not ask("s3://never-there-x/y z").plugin.is_active()
    (tmp_path / "outputs" / "others").mkdir(parents=True)
    (tmp_path / "outputs" / "others" / "events.out.tfevents.1.x").write_bytes(b"")
    plugin = ask().plugin
    monkeypatch.setattr("ddp_hydra.tensorboard.plugin.LOOK_AGAIN_S", 1e9)
    assert not plugin.is_active()
    make_run("outputs/a")
    assert not plugin.is_active()  # it does not look again at once
    monkeypatch.setattr("ddp_hydra.tensorboard.plugin.LOOK_AGAIN_S", 0.0)
    assert plugin.is_active()
    assert plugin.frontend_metadata().tab_name == "Runs"
    assert plugin.frontend_metadata().es_module_path in plugin.get_plugin_apps()


def test_the_names_of_the_places_are_tensorboards():
    assert roots_of("/a/b", None) == {"": "/a/b"}
    assert roots_of("s3://bucket/runs", None) == {"": "s3://bucket/runs"}
    assert roots_of("", "one:/a,/b,s3://x/y,two:s3://z") == {
        "one": "/a", "/b".strip("/"): "/b", "s3://x/y": "s3://x/y", "two": "s3://z",
    }  # fmt: skip
    assert roots_of(None, None) == {}


def test_all_runs_are_told_once_and_then_what_has_changed(ask, make_run, process_of, tmp_path):
    make_run("outputs/a", "model=resnet18", loss=0.25, tags=["good"])
    running = make_run("outputs/day/b")
    (running / "summary.json").unlink()
    process = process_of(running)
    asked = ask()
    first = asked("/runs")
    rows = {row["name"]: row for row in first["rows"]}
    assert set(rows) == {"a", "day/b"}
    assert (rows["a"]["status"], rows["a"]["value"], rows["a"]["tags"]) == ("done", 0.25, ["good"])
    assert (rows["day/b"]["status"], rows["day/b"]["wall_s"]) == ("running", None)
    known = {"instance": first["instance"], "since": first["version"]}
    assert asked("/runs", **known)["rows"] == []
    kill(process)
    shutil.rmtree(tmp_path / "outputs" / "a")
    make_run("outputs/c")
    second = asked("/runs", **known)
    assert asked.response("/run", id=rows["a"]["id"]).status_code == 404
    assert {row["name"]: row["status"] for row in second["rows"]} == {"day/b": "killed", "c": "done"}
    assert second["removed"] == [rows["a"]["id"]]
    assert asked("/runs", instance=first["instance"], since=second["version"])["removed"] == []
    make_run("outputs/a")  # it is there again
    third = asked("/runs", instance=first["instance"], since=second["version"])
    assert ([row["name"] for row in third["rows"]], third["removed"]) == (["a"], [])
    assert len(asked("/runs", instance="another", since=99)["rows"]) == 3


def test_jobs_of_a_sweep_carry_its_name(ask, make_run, tmp_path, monkeypatch):
    folder = tmp_path / "outputs" / "day" / "sweep"
    rows = [SweepRow(number, [f"x={number}"], str(number), JobState.done, 0.5) for number in range(2)]
    for row in rows:
        (folder / row.folder / ".hydra").mkdir(parents=True)
    rows.append(SweepRow(2, ["x=2"], "2"))  # queued: it has no folder
    (folder / "sweep.json").write_text(json_text(rows, SweepObjective("val/loss", False)))
    found = ask()("/runs")
    assert {(row["name"], row["sweep"], row["value"]) for row in found["rows"]} == {
        ("day/sweep/0", "day/sweep", 0.5), ("day/sweep/1", "day/sweep", 0.5),
    }  # fmt: skip
    assert found["sweeps"] == {"day/sweep": {"jobs": 3, "running": False}}
    make_run("outputs/day/other")
    assert len(ask()("/runs", filter="sweep=day/sweep")["chosen"]) == 2
    assert ask()("/runs", filter='"sweep=day"')["chosen"] == []
    for logdir, spec, name in ((str(folder), "", "sweep"), ("", f"night:{folder}", "night"), (".", "", "sweep")):
        monkeypatch.chdir(folder)
        found = ask(logdir, spec)("/runs", filter=f"sweep={name}")
        assert found["sweeps"] == {name: {"jobs": 3, "running": False}}
        assert len(found["chosen"]) == 2
    assert ask(str(folder / "0"))("/runs")["sweeps"] == {}, "one job alone"
    (folder / "sweep.json").write_text("[")
    assert ask()("/runs")["sweeps"] == {"day/sweep": {"jobs": 0, "running": False}}


def test_jobs_whose_subdir_has_slashes_carry_the_name_of_their_sweep(ask, tmp_path):
    folder = tmp_path / "outputs" / "day" / "sweep"
    rows = [SweepRow(number, [], f"lr{number}/w", JobState.done, 0.5) for number in range(2)]
    for name in (*(row.folder for row in rows), "lr0/w/inner"):
        (folder / name / ".hydra").mkdir(parents=True)
    (folder / "sweep.json").write_text(json_text(rows, SweepObjective("val/loss", False)))
    found = ask()("/runs", filter="sweep=day/sweep")
    assert {row["name"]: row["sweep"] for row in found["rows"]} == {
        "day/sweep/lr0/w": "day/sweep", "day/sweep/lr1/w": "day/sweep", "day/sweep/lr0/w/inner": "",
    }  # fmt: skip
    assert len(found["chosen"]) == 2
    assert found["sweeps"] == {"day/sweep": {"jobs": 2, "running": False}}
    assert ask("", f"night:{folder}")("/runs")["sweeps"] == {"night": {"jobs": 2, "running": False}}
    assert ask(str(folder))("/runs")["sweeps"] == {"sweep": {"jobs": 2, "running": False}}
    assert ask("", f"lr0:{folder / 'lr0'}")("/runs")["sweeps"] == {}, "the sweep is above"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("val/loss<0.3", ["a"]),
        ("objective>0.3 status=done,failed", ["c", "day/b"]),
        ("model=re*", ["a", "c", "day/b"]),
        ("tag=good", ["day/b"]),
        ("MODEL=RESNET18", ["a"]),
        ("Day/", ["day/b"]),
        ("trainer.epochs=7", ["c"]),
        ("'", []),
        ("stuck", ["c"]),
        ("  ", None),
    ],
)
def test_the_filter_is_that_of_runs_ls(ask, make_run, words, names):
    make_run("outputs/a", "model=resnet18", loss=0.25)
    make_run("outputs/day/b", loss=0.5, tags=["good"])
    change(make_run("outputs/c", "trainer.epochs=7", "model=resnet50", end="failed", loss=0.75), stopped_early="stuck")
    asked = ask()
    found = asked("/runs", filter=words)
    shown = {row["id"]: row["name"] for row in found["rows"]}
    assert len(shown) == 3
    assert (sorted(shown[key] for key in found["chosen"]) if "chosen" in found else None) == names


@pytest.mark.parametrize(
    ("route", "query", "words"),
    [
        ("/runs", {"filter": "status=dnoe"}, "status=dnoe: give running, done"),
        ("/runs", {"filter": "val/lss<1"}, "no run has this metric"),
        ("/runs", {"since": "-1"}, "'-1' is not a count"),
        ("/log", {"id": "x", "rank": "../0"}, "is not a count"),
        ("/diff", {"id": ["x"]}, "2 to 8 runs are compared"),
        ("/diff", {"id": ["x", "y"]}, "no such run"),
        ("/run", {"id": "../../etc"}, "no such run"),
    ],
)
def test_what_the_page_never_asks_for_is_refused(ask, make_run, route, query, words):
    make_run("outputs/a")
    response = ask().response(route, **query)
    assert response.status_code in (400, 404)
    assert words in response.json["error"]


def test_all_that_is_known_of_a_run(ask, make_run):
    run_dir = make_run("outputs/a", "model=resnet18", steps=6, loss=0.25)
    summary = json.loads((run_dir / "summary.json").read_text())
    failure = {"kind": "killed", "rank": 1, "host": "far", "step": 3, "message": "gone", "traceback": "File x"}
    attempt = {"attempt": 0, "world_size": 2, "steps_done": 2, "started": 1.79e9, "wall_s": 5.0, "failure": failure}
    summary |= {"attempts": [attempt], "restarts": 1, "train_s": 2.0, "data": {"wait_s": 0.5, "wait": 0.25}}
    summary["exchange_s"] = 0.125
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "rank-0.log").write_text("x" * (run_list.LOG_BYTES + 5) + "\n--- attempt 1 ---\nend\n")
    (run_dir / "logs" / "other.log").write_text("not shown")
    asked = ask()
    key = asked.ids()["a"]
    found = asked("/run", id=key)
    assert (found["id"], found["name"], found["place"]) == (key, "a", str(run_dir))
    assert (found["train_s"], found["wait_s"], found["exchange_s"], found["restarts"]) == (2.0, 0.5, 0.125, 1)
    (shown,) = found["attempts"]
    assert (shown["started"], shown["failure"]["message"], shown["failure"]["traceback"]) == (1.79e9, "gone", "File x")
    assert [(one["attempt"], one["to_step"]) for one in found["logged"]] == [(0, 6)]
    assert [point[1:] for point in found["curve"]] == [[step, 0.25] for step in range(1, 7)]
    assert [one["rank"] for one in found["logs"]] == [0]
    (row,) = asked("/runs")["rows"]
    assert row["attempts"] == [{"attempt": 0, "started": 1.79e9, "wall_s": 5.0, "kind": "killed", "rank": 1, "step": 3}]
    log = asked("/log", id=key, rank=0)
    assert log["is_cut"]
    assert len(log["text"]) == run_list.LOG_BYTES
    assert log["text"].endswith("--- attempt 1 ---\nend\n")
    assert asked("/log", id=key, rank=7)["text"] == ""


def change(run_dir: Path, **entries: object) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | entries))


def test_a_long_curve_is_thinned_out_and_keeps_its_end(ask, make_run):
    run_dir = make_run("outputs/a", steps=2)
    lines = [{"time": 1.0 * step, "step": step, "attempt": 0, "val/loss": step / 2} for step in range(1, 1_002)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half of a li')
    asked = ask()
    curve = asked("/run", id=asked.ids()["a"])["curve"]
    assert 300 < len(curve) <= run_list.MOST_POINTS
    assert curve[-1] == [1_001.0, 1_001.0, 500.5]


def test_three_runs_are_compared(ask, make_run):
    for name, words, loss in (("a", (), 0.5), ("b", ("optimizer.lr=0.7",), 0.5), ("c", ("optimizer.lr=0.9",), 0.1)):
        make_run(f"outputs/{name}", *words, loss=loss)
    asked = ask()
    ids = asked.ids()
    found = asked("/diff", id=[ids["c"], ids["a"], ids["b"]])
    assert found["names"] == ["c", "a", "b"]
    assert found["code"] is None
    assert found["config"]["optimizer.lr"][::2] == ["0.9", "0.7"]
    assert found["metrics"] == {"val/loss": ["0.1", "0.5", "0.5"]}


def test_runs_that_are_compared_show_different_values_and_configs_that_cannot_be_read(ask, make_run):
    long = "x" * 600
    contents = [f"a: 1\nb: null\nc: {long}1\nd: 1", f"a: '1'\nb: 'null'\nc: {long}2\nd: 2", "a: [", f"a: {long}\nd: 3"]
    for name, content in zip("abcd", contents, strict=True):
        (make_run(f"outputs/{name}") / ".hydra" / "config.yaml").write_text(content)
    asked = ask()
    ids = asked.ids()
    found = asked("/diff", id=[ids["a"], ids["b"]])
    assert found["problems"] == []
    assert found["config"] == {
        "a": ["1", '"1"'], "b": ["null", '"null"'], "c": [f'"{long}1"', f'"{long}2"'], "d": ["1", "2"],
    }  # fmt: skip
    found = asked("/diff", id=[ids["a"], ids["d"], ids["c"]])
    assert found["config"]["d"] == ["1", "3", "(unknown)"]
    assert found["config"]["a"] == ["1", long[:500], "(unknown)"]
    assert found["config"]["b"] == ["null", "(missing)", "(unknown)"]
    assert [one.partition("outputs/")[2] for one in found["problems"]] == [
        "c/.hydra/config.yaml is missing or can't be read: the config of this run is not compared"
    ]
    assert asked("/diff", id=[ids["a"], ids["c"]])["config"] == {}


def test_answers_are_json_that_no_browser_takes_for_anything_else(ask, make_run):
    make_run("outputs/a")
    asked = ask()
    for route in ("/runs", "/run", "/log", "/diff"):
        response = asked.response(route)
        assert response.content_type == "application/json"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert asked.response(route, method=method).status_code == 405
    for route in asked.apps.keys() - {"/runs", "/run", "/log", "/diff"}:
        response = asked.response(route)
        assert response.content_type.startswith(("text/javascript", "text/css"))
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "/index.js" in asked.apps


def test_nothing_outside_of_the_log_directory_is_shown(ask, make_run, tmp_path):
    outside = make_run("elsewhere/secret", loss=0.125)
    (outside / "logs").mkdir(exist_ok=True)
    (outside / "logs" / "rank-0.log").write_text("secret")
    run_dir = make_run("outputs/a", loss=0.5)
    shutil.rmtree(run_dir / "logs", ignore_errors=True)
    (run_dir / "logs").symlink_to(outside / "logs")
    shutil.rmtree(run_dir / ".hydra")
    (run_dir / ".hydra").symlink_to(outside / ".hydra")
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (tmp_path / "outputs" / "link").symlink_to(outside)
    pointing = tmp_path / "outputs" / "pointing"
    pointing.mkdir()
    (pointing / "results.url").write_text(f"file://{outside}\n")
    asked = ask()
    ids = asked.ids()
    assert set(ids) == {"a", "pointing"}
    found = asked("/run", id=ids["a"])
    assert (found["logs"], found["curve"], found["overrides"]) == ([], [], [])
    assert asked("/log", id=ids["a"], rank=0)["text"] == ""
    assert asked("/run", id=ids["pointing"])["status"] == "detached"
    assert asked("/run", id=ids["pointing"])["value"] is None
    # A link takes the place of the folder after it has been found.
    runs = asked.plugin.runs
    shutil.rmtree(run_dir)
    run_dir.symlink_to(outside)
    with pytest.raises(run_list.NoSuchRunError):
        runs.files(ids["a"])
    assert asked("/runs")["rows"]


def test_a_log_directory_that_is_a_link_itself_is_what_it_leads_to(ask, make_run, tmp_path):
    make_run("elsewhere/a", loss=0.5)
    (tmp_path / "outputs").symlink_to(tmp_path / "elsewhere")
    asked = ask()
    assert asked("/run", id=asked.ids()["a"])["value"] == 0.5


def test_a_run_may_be_the_log_directory_itself(ask, make_run, monkeypatch):
    run_dir = make_run("outputs/a", loss=0.5)
    monkeypatch.chdir(run_dir)
    for logdir in (".", str(run_dir), f"{run_dir}/", "./../a"):
        asked = ask(logdir)
        assert asked("/run", id=asked.ids()["a"])["value"] == 0.5


def test_hostile_and_broken_files_are_shown_as_text_or_not_at_all(ask, make_run, tmp_path):
    run_dir = make_run("outputs/a")
    summary = json.loads((run_dir / "summary.json").read_text())
    summary |= {
        "metrics": {HOSTILE: 1.0, "x": None}, "tags": [HOSTILE], "project": HOSTILE,
        "objective": {"metric": HOSTILE, "direction": HOSTILE}, "started": 1e300, "wall_s": None,
        "attempts": [{"failure": {"kind": HOSTILE, "place": HOSTILE * 999}}],
        "failure": {"kind": HOSTILE, "message": HOSTILE * 9_999, "traceback": HOSTILE, "host": HOSTILE * 999},
        "data": {HOSTILE: 1.0}, "slowest": {HOSTILE: None}, "profile": HOSTILE,
    }  # fmt: skip
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "metrics.jsonl").write_bytes(b'{"time":NaN}\n[]\n{"time":1,"step":2,"attempt":1e999}\n\xff\xfe\n{"a":')
    (run_dir / ".hydra" / "overrides.yaml").write_text(json.dumps([f"x={HOSTILE}", {}, 3]))
    (run_dir / ".hydra" / "config.yaml").write_text(
        "when: 2026-01-01\nnan: .nan\n? [1, 2]\n: x\nz: !!python/object:os 1"
    )
    (run_dir / "checkpoints" / "manifest.json").write_text(json.dumps({"checkpoints": {HOSTILE: {"step": HOSTILE}}}))
    run_dir.rename(run_dir.with_name("a\n<b>&\udcff"))
    other = make_run("outputs/b")
    (other / ".hydra" / "config.yaml").write_text("a: 1\nwhen: 2026-01-01\nd: {e: [2026-01-01, .nan]}\n")
    (other / "summary.json").write_text("{")
    (tmp_path / "outputs" / "c").mkdir()
    os.mkfifo(tmp_path / "outputs" / "c" / "summary.json")
    (tmp_path / "outputs" / "d" / "status.json").mkdir(parents=True)
    (tmp_path / "outputs" / "e").mkdir()
    (tmp_path / "outputs" / "e" / "summary.json").write_text("[" * 100_000)
    (tmp_path / "outputs" / "f").mkdir()
    (tmp_path / "outputs" / "f" / "summary.json").write_text(json.dumps(summary | {"tags": [HOSTILE, 1]}))
    (tmp_path / "outputs" / "g").mkdir()
    (tmp_path / "outputs" / "g" / "summary.json").write_text(json.dumps(summary | {"wall_s": float("inf")}))
    asked = ask()
    ids = asked.ids()
    assert len(ids) == 7
    assert "a\n<b>&\udcff" in ids
    for key in ids.values():
        found = asked("/run", id=key)
        assert len(json.dumps(found)) < 200_000
        for other_key in set(ids.values()) - {key}:
            asked("/diff", id=[key, other_key])
    found = asked("/run", id=ids["a\n<b>&\udcff"])
    assert found["failure"]["message"].startswith(HOSTILE)
    assert len(found["failure"]["message"]) <= details.MOST_TRACEBACK
    assert (found["metrics"]["x"], found["value"], found["wall_s"]) == (None, 1.0, None)
    assert "summary.json can't be read: Expected `str`, got `int`" in asked("/run", id=ids["f"])["message"]
    assert "summary.json can't be read: Expected `float` <= " in asked("/run", id=ids["g"])["message"]


def test_many_requests_at_once_look_at_the_runs_once(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_list, "SHORTEST_PAUSE_S", 1e9)
    make_run("outputs/a")
    looks = []
    original = run_list.find.local_rows
    monkeypatch.setattr(run_list.find, "local_rows", lambda *args, **more: looks.append(1) or original(*args, **more))
    runs = run_list.RunList({"": str(tmp_path / "outputs")})
    for _ in range(5):
        assert len(runs.changes()["rows"]) == 1
    assert len(looks) == 1


@pytest.mark.integration
def test_runs_in_a_bucket(ask, s3, credentials, monkeypatch, make_run):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    run_dir = make_run("a", loss=0.25)
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "rank-0.log").write_text("hello\n")
    objects = {f"runs/day/a/{path.relative_to(run_dir)}": path.read_bytes() for path in run_dir.rglob("*.*")
               if path.is_file()}  # fmt: skip
    asked = ask(f"s3://{s3.fill(objects)}/runs")
    wait_for(asked.plugin.is_active, "the run is found")  # it does not wait for the store
    key = asked.ids()["day/a"]
    assert asked("/run", id=key)["value"] == 0.25
    assert asked("/log", id=key, rank=0)["text"] == "hello\n"
