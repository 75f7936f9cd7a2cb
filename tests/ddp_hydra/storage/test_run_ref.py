"""What `resume=` and `run=` name: each way to name a run leads to the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hydra.cli.inference import saved_config
from ddp_hydra.cli.resumed import _overrides_of
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.job.loggers import read_runs
from ddp_hydra.storage import run_ref
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.storage.urls import POINTER


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "outputs" / "a"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- optimizer.lr=0.1\n")
    (folder / ".hydra" / "config.yaml").write_text("seed: 3\n")
    (folder / "loggers.json").write_text('{"wandb": {"id": "x"}}')
    for name in ("last", "best"):
        (folder / "checkpoints" / f"{name}.pt").write_text(name)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_run_without_a_best_checkpoint_names_the_run_that_it_has_resumed(run_dir):
    (run_dir / "checkpoints" / "best.pt").unlink()
    for resumed, told in [("outputs/b", "; or give run=outputs/b, which it has"), ("outputs/a", ""), ("null", "")]:
        (run_dir / ".hydra" / "config.yaml").write_text(f"data:\n  resume: x\nresume: {resumed}\n")
        with pytest.raises(CheckpointError, match=r"has no best\.pt") as caught:
            RunRef.named("outputs/a").checkpoint("best", run_dir)
        assert ("or give run=" in str(caught.value)) == bool(told)
        assert told in str(caught.value)


NAMES = (
    "outputs/a",
    "outputs/a/",
    "{absolute}",
    "outputs/a/checkpoints",
    "outputs/a/checkpoints/best.pt",
    "file://{absolute}",
    "~/outputs/a",
    "~/outputs/a/checkpoints/best.pt",
)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_a_run_leads_to_its_folder(run_dir, name, monkeypatch):
    given = name.format(absolute=run_dir)
    monkeypatch.setenv("HOME", str(run_dir.parents[1]))
    assert Path(RunRef.named(given).folder).samefile(run_dir)
    assert saved_config(given) == {"seed": 3}
    assert _overrides_of(given) == ["optimizer.lr=0.1"]
    assert read_runs(given) == {"wandb": {"id": "x"}}
    expected = "best.pt" if given.endswith(".pt") else "last.pt"
    assert RunRef.named(given).checkpoint("last", run_dir / "download") == run_dir / "checkpoints" / expected


def test_the_checkpoints_folder_is_known_from_inside_it(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir / "checkpoints")
    assert Path(RunRef.named(".").folder).samefile(run_dir)


@pytest.mark.parametrize("url", ["s3://bucket/runs/a", "s3://bucket/runs/a/", "s3://bucket/runs/a/checkpoints"])
def test_the_url_of_a_run_is_that_of_its_folder(url, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        run_ref, "fetch_checkpoint", lambda *words, **more: asked.append((words, more)) or tmp_path / "x"
    )
    ref = RunRef.named(url)
    assert (ref.is_stored, ref.folder) == (True, "s3://bucket/runs/a")
    assert ref.checkpoint("best", tmp_path / "new", 7.0) == tmp_path / "x"
    assert asked == [((url, tmp_path / "new", "best"), {"retry_s": 7.0})]


def test_a_folder_that_points_to_its_results_is_the_run_there_and_keeps_its_words(run_dir):
    (run_dir / "results.url").write_text("s3://bucket/runs/a\n")
    assert RunRef.named(run_dir).place == "s3://bucket/runs/a"
    assert _overrides_of(str(run_dir)) == ["optimizer.lr=0.1"]


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        RunRef.named(tmp_path / "nowhere").checkpoint("last", tmp_path)
    with pytest.raises(ConfigError, match="which=newest: give best or last"):
        RunRef.named(tmp_path).checkpoint("newest", tmp_path)
    with pytest.raises(FileNotFoundError):
        RunRef.named(tmp_path / "nowhere" / "x.pt").read("loggers.json")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"s3://a\ns3://b"])
def test_a_broken_pointer_is_a_sentence(content, tmp_path):
    (tmp_path / POINTER).write_bytes(content)
    with pytest.raises(ConfigError, match="is broken: it should hold the address of the run's results"):
        RunRef.named(tmp_path)


@pytest.mark.parametrize("target", ["link", "gone"])
def test_a_link_that_leads_nowhere_is_told_so(tmp_path, target):
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"link is a link to {target}, which leads nowhere"):
        RunRef.named(tmp_path / "link").checkpoint("last", tmp_path)
