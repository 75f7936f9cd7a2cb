"""`ddp-hydra runs`: its words and what it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_hydra.cli import main, runs
from ddp_hydra.config import project
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job.run_dir import keep_project
from tests.ddp_hydra.runs.conftest import hydra_files as hydra_files
from tests.ddp_hydra.runs.conftest import make_run as make_run
from tests.ddp_hydra.runs.conftest import own_cache as own_cache

pytestmark = pytest.mark.medium


@pytest.fixture
def three(make_run, tmp_path, monkeypatch):
    """Three runs below the current folder."""
    make_run("outputs/a", "model=resnet18", tags=["good"], loss=0.5)
    make_run("outputs/b", end="failed", loss=0.1)
    make_run("multirun/s/0", "optimizer.lr=0.5", loss=0.7)
    monkeypatch.chdir(tmp_path)


def listed(capsys, *words: str) -> list[str]:
    runs.main(["ls", *words, "json=true"])
    return [json.loads(line)["run"] for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_newest_first(three, capsys):
    runs.main(["ls"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "when", "status", "steps", "objective", "model", "data", "tags", "took", "typed"]
    assert [line.split()[0] for line in lines[1:]] == ["multirun/s/0", "outputs/b", "outputs/a"]
    assert "val/loss 0.5" in lines[3]
    assert "resnet18" in lines[3]
    runs.main(["ls", "limit=1"])
    assert capsys.readouterr().out.splitlines()[-1] == "2 more: limit=0 shows all 3"


def test_the_name_of_a_place_may_hold_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    places, options = ["a", "lr=1", "s3://b/runs/user=me/1"], ["lr=2", "out=s3://b/x", "val/loss<1"]
    assert runs.split([*places, *options]) == (places, options)


def test_runs_are_told_apart_by_what_was_typed_for_some_of_them_only(make_run, tmp_path, monkeypatch, capsys):
    for number, lr in enumerate(("0.1", "0.2")):
        make_run(f"multirun/s/{number}", "seed=3", "model=mlp", f"optimizer.lr={lr}", loss=0.5)
    monkeypatch.chdir(tmp_path)
    runs.main(["ls", "sort=folder", "val/loss<1"])
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[4:] == ["objective", "val/loss", "model", "data", "tags", "took", "typed"]
    assert [line.split()[-1] for line in lines] == ["optimizer.lr=0.1", "optimizer.lr=0.2"]
    assert not any("seed=3" in line for line in lines)
    assert all(line.split()[7] == "0.5" for line in lines)
    runs.main(["ls", "multirun/s/0"])
    assert "typed" not in capsys.readouterr().out


def test_words_choose_and_order(three, capsys):
    assert listed(capsys, "outputs", "status=failed") == ["outputs/b"]
    assert listed(capsys, "val/loss<=0.5", "sort=val/loss") == ["outputs/b", "outputs/a"]
    assert listed(capsys, "objective>0.6") == ["multirun/s/0"]
    assert listed(capsys, "tag=go*", "model=resnet18", "since=1d") == ["outputs/a"]
    assert listed(capsys, "limit=1", "sort=folder") == ["multirun/s/0"]
    assert listed(capsys, "since=2999-01-01") == []


def test_a_folder_may_have_an_equals_sign_in_its_name(make_run, tmp_path, monkeypatch, capsys):
    make_run("lr=0.1,x=2/a")
    monkeypatch.chdir(tmp_path)
    assert listed(capsys, "lr=0.1,x=2") == ["lr=0.1,x=2/a"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "runs list: there is no such command.* ls, show, diff, rm, du, tag, reproduce"),
        (
            ["ls", "stats=done"],
            r"stats=done: there is no such key: did you mean status\? The keys are status, tag",
        ),
        (["ls", "optimizer.lr=1"], r"optimizer\.lr=1: there is no such key; the keys are status"),
        (["ls", "limit=some"], "limit"),
        (["ls", "limit=-5"], "limit=-5: give how many"),
        (["ls", "sort=val/los"], "no run has this metric"),
        (["show"], "show takes one run, not 0"),
        (["show", "outputs"], "outputs is not a run directory.*runs ls outputs lists"),
        (["show", "no_such"], "there is no such folder"),
        (["diff", "outputs/a"], "diff takes 2 runs, not 1"),
        (["rm"], "rm needs a run"),
        (["rm", "outputs/a"], "rm asks on a terminal only: give yes=true"),
        (["tag", "outputs/a", "color=red"], "tag takes one run"),
        (["reproduce", "outputs/a", "force=true"], "the keys are run"),
    ],
)
def test_mistakes_are_said(three, words, said):
    with pytest.raises(ConfigError, match=said):
        runs.main(words)


def test_a_run_is_shown(three, capsys):
    runs.main(["show", "outputs/b"])
    shown = capsys.readouterr().out
    for part in ("status      failed", "rank 1 on far at step 3: red", "last.pt, step 4", "val/loss 0.1", "code"):
        assert part in shown
    runs.main(["show", "outputs/a", "json=true"])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["overrides"], found["restarts"]) == ("done", ["model=resnet18"], 0)
    assert found["bytes"]["checkpoints"] > 0


def test_two_runs_are_compared(three, capsys):
    runs.main(["diff", "outputs/b", "multirun/s/0"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["outputs/b", "multirun/s/0"]
    assert ["status", "failed", "done"] in lines
    assert ["val/loss", "0.1", "0.7"] in lines
    assert [line[-1] for line in lines if line[0] == "optimizer.lr"] == ["0.5"]
    runs.main(["diff", "outputs/a", "outputs/a"])
    assert "config and code are the same" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "a: [1,", "- a", None])
def test_a_config_that_cannot_be_read_is_named_and_not_compared(three, tmp_path, capsys, content):
    saved = tmp_path / "outputs" / "a" / ".hydra"
    (saved / "hydra.yaml").write_text("{")
    (saved / "config.yaml").write_text(content) if content is not None else (saved / "config.yaml").unlink()
    runs.main(["diff", "outputs/a", "outputs/b"])
    *lines, said = capsys.readouterr().out.splitlines()
    assert said == ("outputs/a/.hydra/config.yaml is missing or can't be read: the config of this run is not compared")
    assert [line.split()[:2] for line in lines[1:]] == [
        ["status", "done"], ["model", "(missing)"], ["data", "(missing)"], ["val/loss", "0.5"],
    ]  # fmt: skip
    runs.main(["diff", "outputs/a", "outputs/a"])
    assert "the same" not in capsys.readouterr().out
    runs.main(["reproduce", "outputs/a"])
    assert "outputs/a/.hydra/hydra.yaml is missing or can't be read: where it was typed" in capsys.readouterr().err
    assert len(listed(capsys)) == 3


def test_sizes_are_shown(three, capsys):
    runs.main(["du"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "checkpoints", "logs", "other", "total"]
    assert lines[-1].startswith("total of 3 runs")
    runs.main(["du", "outputs", "json=true"])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_tags_are_added_and_removed(three, capsys):
    runs.main(["tag", "outputs/a", "+best", "-good"])
    assert capsys.readouterr().out == "outputs/a: best\n"
    assert listed(capsys, "tag=best") == ["outputs/a"]
    with pytest.raises(ConfigError, match="the run has no tag of old; it has best"):
        runs.main(["tag", "outputs/a", "-of old"])
    runs.main(["tag", "outputs/b"])
    assert capsys.readouterr().out == "outputs/b: no tags\n"


def test_a_removal_asks(three, monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    with pytest.raises(Interrupted, match="nothing was removed"):
        runs.main(["rm", "outputs/a"])
    assert asked == ["remove outputs/a with 1 run? [y/N] "]
    monkeypatch.setattr("builtins.input", lambda question: "y")
    runs.main(["rm", "outputs/a"])
    runs.main(["rm", "outputs/b", "yes=true"])
    assert list((tmp_path / "outputs").iterdir()) == []
    assert capsys.readouterr().out.startswith("removed outputs/a, ")


def test_results_elsewhere_are_said_to_stay(three, tmp_path, capsys):
    pointer = tmp_path / "outputs" / "a" / "results.url"
    for address, said in (("s3://bucket/a", ["its results stay in s3://bucket/a"]), ("s3://bucket/a\x1b[2J", [])):
        pointer.parent.mkdir(exist_ok=True)
        pointer.write_text(f"{address}\n")
        runs.main(["rm", "outputs/a", "yes=true"])
        assert capsys.readouterr().out.splitlines()[1:] == said


def test_a_run_is_repeated_by_its_words(three, capsys, monkeypatch):
    runs.main(["reproduce", "multirun/s/0"])
    printed = capsys.readouterr()
    assert printed.out == "ddp-hydra optimizer.lr=0.5\n"
    assert "the code is not the same: c0dec0dec0dec0de then, " in printed.err
    assert "has not kept its own" in printed.err
    called = []
    monkeypatch.setattr("os.execve", lambda program, words, variables: called.append((words[1:], variables)))
    runs.main(["reproduce", "multirun/s/0", "run=true"])
    assert called == [(["-m", "ddp_hydra", "optimizer.lr=0.5"], dict(os.environ))]


def test_a_run_that_was_resumed_in_its_own_folder_is_repeated_from_its_beginning(three, make_run, tmp_path, capsys):
    saved = tmp_path / "outputs" / "a" / ".hydra"
    hydra = OmegaConf.load(saved / "hydra.yaml")
    OmegaConf.update(hydra, "hydra.runtime.cwd", "/typed/here", force_add=True)
    OmegaConf.update(hydra, "hydra.runtime.output_dir", "/typed/here/o/h1", force_add=True)
    OmegaConf.save(hydra, saved / "hydra.yaml")
    names = ("o/h1", "'o/h1/'", "/typed/here/o/h1/checkpoints/last.pt", "file:///typed/here/o/h1", f"{saved.parent}")
    own = [f"resume={name}" for name in names]
    others = ["resume=o/h10", "resume=s3://bucket/o/h1", "resume=null"]
    (saved / "overrides.yaml").write_text(json.dumps(["seed=1", *own, *others, "trainer.epochs=4"]))
    runs.main(["reproduce", "outputs/a"])
    one = "hydra.mode=RUN"  # what is resumed may be a job of a sweep
    assert capsys.readouterr().out == f"ddp-hydra seed=1 {' '.join(others)} trainer.epochs=4 {one}\n"


def test_a_run_is_repeated_with_the_code_that_it_has_kept(three, tmp_path, monkeypatch, capsys):
    own, run_dir = tmp_path / "own", tmp_path / "outputs" / "a"
    (own / "models").mkdir(parents=True)
    (own / "models" / "mine.py").write_text("x = 1\n")
    packed = project.pack(own, project.starter())
    keep_project(run_dir, packed)
    runs.main(["reproduce", "outputs/a"])  # another hash is in summary.json
    assert capsys.readouterr().out == "ddp-hydra model=resnet18\n"
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "project": packed.sha256}))
    called = []
    monkeypatch.setattr("os.execve", lambda program, words, variables: called.append(variables))
    runs.main(["reproduce", "outputs/a", "run=true"])
    folder = Path(called[0]["DDP_HYDRA_PROJECT"])
    assert (folder / "models" / "mine.py").read_text() == "x = 1\n"
    assert project.pack(folder, project.starter()).sha256 == packed.sha256
    runs.main(["reproduce", "outputs/a"])
    assert capsys.readouterr().out == f"DDP_HYDRA_PROJECT={folder} ddp-hydra model=resnet18\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(saved := run_dir / "summary.json"))
    said = (
        rf"outputs/a can't be unpacked into {saved}/ddp_hydra/projects \(Not a directory\): set XDG_CACHE_HOME=<another"
    )
    with pytest.raises(ConfigError, match=said):
        runs.main(["reproduce", "outputs/a"])


def test_a_run_is_repeated_with_its_folder_of_configs(three, tmp_path, monkeypatch, capsys):
    extra, saved = tmp_path / "a b", tmp_path / "outputs" / "a" / ".hydra" / "hydra.yaml"
    extra.mkdir()
    hydra = OmegaConf.load(saved)
    added = {"path": str(extra), "schema": "file", "provider": "--config-dir"}
    OmegaConf.update(hydra, "hydra.runtime.config_sources", [added])
    OmegaConf.save(hydra, saved)
    runs.main(["reproduce", "outputs/a"])
    printed = capsys.readouterr()
    assert printed.out == f"ddp-hydra '--config-dir={extra}' model=resnet18\n"
    assert "is not there" not in printed.err
    extra.rmdir()
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    called = []
    monkeypatch.setattr("os.execve", lambda program, words, variables: called.append(variables))
    assert main.report(lambda: runs.main(["reproduce", "outputs/a", "run=true"])) == 0
    assert f"--config-dir {extra} is not there: type --config-dir <where it is now>" in capsys.readouterr().err
    assert "HYDRA_FULL_ERROR" not in called[0], "the command would tell a mistake with a traceback"


def test_secrets_and_options_are_not_repeated(three, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("it was run"))
    saved = tmp_path / "outputs" / "a" / ".hydra" / "overrides.yaml"
    saved.write_text("- +cluster.password=***\n")
    runs.main(["reproduce", "outputs/a"])
    assert "fill in +cluster.password" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is a secret"):
        runs.main(["reproduce", "outputs/a", "run=true"])
    saved.write_text("- --config-dir=/tmp/evil\n")
    with pytest.raises(ConfigError, match="which is not an override"):
        runs.main(["reproduce", "outputs/a", "run=true"])


HOSTILE = "a\x1b]0;owned\x07[bold]\x1b[2J\nb\u202e\tc"


def test_nothing_of_a_run_does_anything_in_the_terminal(three, tmp_path, capsys):
    folder = tmp_path / "outputs" / "a"
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {
        "metrics": {HOSTILE: 1.0}, "tags": [HOSTILE], "project": HOSTILE, "objective": {"metric": HOSTILE},
        "attempts": [{"attempt": 0, "failure": {"message": HOSTILE, "host": HOSTILE, "rank": 0}}],
        "failure": {"kind": HOSTILE, "message": HOSTILE, "place": HOSTILE},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([f"x={HOSTILE}"]))
    (folder / ".hydra" / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    manifest = {"checkpoints": {HOSTILE: {"step": HOSTILE, "size": 1}}}
    (folder / "checkpoints" / "manifest.json").write_text(json.dumps(manifest))
    odd = folder.rename(folder.with_name(HOSTILE))
    place = str(odd)
    for words in (["ls"], ["show", place], ["diff", place, "outputs/b"], ["du"], ["tag", place], ["reproduce", place]):
        runs.main(words)
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert all(one.isprintable() or one == "\n" for one in text), text
        assert "a[bold]" in text
        assert "\nb" not in text.replace("\nbatch", "")


def test_columns_are_straight_with_wide_letters():
    table = runs.table(["a", "b"], [["日本", "1"], ["x", "22"]], right=["b"])
    assert table.splitlines() == ["a      b", "日本   1", "x     22"]
