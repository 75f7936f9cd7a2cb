"""Runs in a bucket."""

from __future__ import annotations

import json
import time

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.runs import details, disk, find, run_files

pytestmark = pytest.mark.medium


@pytest.fixture
def root(s3, credentials, monkeypatch, make_run):
    """The URL of a folder with a run that is done, one that is lost, and checkpoints of neither."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    run_dir = make_run("a", "model=resnet18", tags=["first"])
    objects = {
        f"runs/day/a/{path.relative_to(run_dir)}": path.read_bytes() for path in run_dir.rglob("*") if path.is_file()
    }
    objects["runs/day/a/status.json"] = json.dumps({"state": "done", "scheduler": "tcp://x:1"}).encode()
    lost = {"state": "running", "scheduler": "tcp://x:1", "time": time.time() - 60, "step": 3, "total_steps": 9}
    objects["runs/day/b/status.json"] = json.dumps(lost).encode()
    objects["runs/mirror/checkpoints/manifest.json"] = b"{}"
    objects["runs2/c/status.json"] = b"{}"
    return f"s3://{s3.fill(objects)}/runs"


def test_they_are_listed_shown_compared_measured_and_tagged(root):
    rows = {row.run: row for row in find.rows([root])}
    assert set(rows) == {f"{root}/day/a", f"{root}/day/b"}
    assert [rows[f"{root}/day/{name}"].status for name in "ab"] == ["done", "lost"]
    first, second = (run_files.open_run(f"{root}/day/{name}") for name in "ab")
    found = details.run_details(first)
    assert (found["value"], found["model"], found["tags"]) == (0.5, "resnet18", ["first"])
    assert found["checkpoints"]["last.pt"]["step"] == 4
    assert details.row(second).total_steps == 9
    assert details.between(first, second)["status"] == ["done", "lost"]
    usage = disk.usage([root])
    assert usage[f"{root}/day/a"] == found["bytes"]
    assert usage[f"{root}/day/b"]["other"] > 0
    assert run_files.change_tags(first, ["first"], ["+good"]) == ["first", "good"]
    assert run_files.change_tags(first, ["first"], ["-first"]) == ["good"]
    assert details.row(first).tags == ["good"]
    with pytest.raises(ConfigError, match="mirror holds no run"):
        run_files.open_run(f"{root}/mirror")
    with pytest.raises(ConfigError, match="bucket"):
        find.rows(["s3://there-is-no-such-bucket/runs"])


def test_a_run_directory_that_points_there_is_that_run(root, tmp_path):
    folder = tmp_path / "outputs" / "x"
    folder.mkdir(parents=True)
    (folder / "results.url").write_text(f"{root}/day/a\n")
    assert [row.status for row in find.rows([str(tmp_path / "outputs")])] == ["detached"]
    assert details.run_details(run_files.open_run(str(folder)))["run"] == f"{root}/day/a"
