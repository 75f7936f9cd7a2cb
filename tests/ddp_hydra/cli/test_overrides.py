from __future__ import annotations

import json
import os
import re
import shlex

import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ddp_hydra.api import ComposedConfig
from ddp_hydra.cli import compose, resumed
from ddp_hydra.cli.inference import saved_config
from ddp_hydra.config.hydra_compat import parse_override, typed_sources
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    """A run directory that was started with some overrides."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(
        "- experiment=digits\n- cluster.n_workers=4\n- optimizer.lr=0.1\n- +model.extra=1\n- resume=elsewhere\n"
        "- trainer.pause_after_validations=1\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], ["experiment=digits", "cluster.n_workers=4", "optimizer.lr=0.1", "+model.extra=1"]),
        (["optimizer.lr=0.2"], ["experiment=digits", "cluster.n_workers=4", "+model.extra=1"]),
        (["cluster=inline"], ["experiment=digits", "optimizer.lr=0.1", "+model.extra=1"]),
        (["experiment=pet_names"], ["cluster.n_workers=4", "optimizer.lr=0.1", "+model.extra=1"]),
    ],
)
def test_a_resumed_run_brings_its_overrides_and_those_given_now_win(run, given, kept):
    arguments = [*given, f"resume={run}"]
    assert resumed.with_resumed_overrides(arguments) == kept + arguments


@pytest.mark.parametrize(
    ("saved", "given", "found"),
    [
        (["+loss.weight=[1]"], ["~loss.weight"], ["+loss.weight=[1]", "~loss.weight"]),
        (["+loss.weight=[1]"], ["loss.weight=[2]"], ["+loss.weight=[2]"]),
        (["++loss.weight=[1]"], ["loss.weight=[2]"], ["++loss.weight=[2]"]),
        (["+c.mine.a=1", "+c.mine.b=2"], ["c.mine.a=3"], ["+c.mine.b=2", "+c.mine.a=3"]),
        (["+c.mine.a=1", "+c.mine.b=2"], ["~c.mine"], ["+c.mine.a=1", "+c.mine.b=2", "~c.mine"]),
        (["+c.mine.a=1", "+c.mine.b=2"], ["c.mine={a:3}"], ["++c.mine={a:3}"]),
        (["+c.mine.a=1"], ["~c.mine", "+c.mine.a=2"], ["+c.mine.a=1", "~c.mine", "+c.mine.a=2"]),
        (["+c.mine={a:1}"], ["c.mine.a=2"], ["+c.mine={a:1}", "c.mine.a=2"]),
        (["+c.key=***"], ["~c.key"], ["+c.key=***", "~c.key"]),
        # Of a run that was resumed so.
        (["+loss.weight=[1]", "~loss.weight"], ["+loss.weight=[2]"], ["+loss.weight=[2]"]),
        (["+c.mine.a=1", "~c.mine"], ["+c.mine.a=2"], ["+c.mine.a=1", "~c.mine", "+c.mine.a=2"]),
        (["+c.mine.a=1", "~c.mine"], ["~c.mine"], ["+c.mine.a=1", "~c.mine"]),
        (["+c.mine.a=1", "~c.mine"], ["c=other"], ["c=other"]),
        (["~c.a", "+c.a=1"], ["~c.a"], ["~c.a", "+c.a=1", "~c.a"]),
        # A key of every job gets its default again.
        (["results.wandb.project=a", "results.wandb.mode=b"], ["~results.wandb"], []),
        (["trainer.time_limit_s=600", "a=1"], ["~trainer.time_limit_s"], ["a=1"]),
        (["trainer.time_limit_s=null", "seed=3"], ["~trainer.time_limit_s", "~seed"], []),
        (["++results.retry_s=1", "results.retry_s=2"], ["~results.retry_s"], []),
        (["trainer.epochs=1"], ["~trainer.time_limit_s"], ["trainer.epochs=1", "~trainer.time_limit_s"]),
        (["trainer.epochs=1"], ["~trainer.epochs", "trainer.epochs=2"], ["trainer.epochs=2"]),
        # A group that is chosen now has its own keys.
        (["+loss.weight=[1]"], ["loss=mse", "loss.weight=2"], ["loss=mse", "loss.weight=2"]),
        (["data.val.a=1"], ["data=x", "~data.val.a"], ["data=x", "~data.val.a"]),
        (["~data.val.a"], ["data=x", "~data.val.a"], ["data=x", "~data.val.a"]),
        (["+transform@c.x=a", "c.x.size=1"], ["transform@c.x=b"], ["+transform@c.x=b"]),
        (["+transform@c.x=a", "c.x.size=1"], ["~transform@c.x"], []),
        (["mix=a", "+mix.b=1"], ["~mix"], ["~mix"]),
    ],
)
def test_what_a_run_was_begun_with_by_plus_can_be_removed_and_changed(run, saved, given, found):
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(saved))
    assert resumed.with_resumed_overrides([*given, f"resume={run}"]) == [*found, f"resume={run}"]


def test_weights_that_are_typed_with_a_resume_are_refused_unless_the_run_began_with_them(run):
    given = [f"model.weights={run}/mine.pt", f"resume={run}"]
    with pytest.raises(ConfigError, match=r"^model\.weights=\S+: resume=\S+ takes the run's weights: leave one of"):
        resumed.with_resumed_overrides(given)
    assert resumed.with_resumed_overrides(["model.weights=DEFAULT", given[1]])[-2] == "model.weights=DEFAULT"
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(given[:1]))
    assert resumed.with_resumed_overrides(given) == given
    assert resumed.with_resumed_overrides(given[1:]) == given


def test_a_key_of_every_job_that_was_typed_with_its_group_is_not_dropped(run):
    saved = run / ".hydra" / "overrides.yaml"
    saved.write_text(json.dumps(["trainer={time_limit_s: 5, epochs: 2}", "a=1"]))
    said = (
        r"^~trainer\.time_limit_s: the run was begun with trainer=\{time_limit_s: 5, epochs: 2\}, of which no part is "
        r"dropped: give trainer\.time_limit_s=<value>$"
    )
    with pytest.raises(ConfigError, match=said):
        resumed.with_resumed_overrides(["~trainer.time_limit_s", f"resume={run}"])
    found = ["trainer={time_limit_s: 5, epochs: 2}", "a=1", "trainer.time_limit_s=null", f"resume={run}"]
    assert resumed.with_resumed_overrides(["trainer.time_limit_s=null", f"resume={run}"]) == found
    saved.write_text(json.dumps(["trainer={epochs: 2}", "trainer.time_limit_s=5"]))
    found = ["trainer={epochs: 2}", f"resume={run}"]
    assert resumed.with_resumed_overrides(["~trainer.time_limit_s", f"resume={run}"]) == found


def test_a_group_without_an_option_is_told_with_how_its_keys_are_removed():
    said = r"^~callbacks: no option of this group is chosen; leave it out, or remove its keys, '~callbacks\.<key>'$"
    with pytest.raises(ConfigError, match=said):
        ComposedConfig(["+callbacks.mine.at=5", "~callbacks"])


def test_hydra_takes_the_words_of_runs_that_were_resumed_one_after_the_other(run):
    saved = run / ".hydra" / "overrides.yaml"
    saved.write_text(json.dumps(["+loss.weight=[1,2]", "+callbacks.mine._target_=a.B", "+callbacks.mine.at=5"]))
    # Typed at each resume, and what is then in the config.
    resumes = [
        (["loss.weight=[3,4]"], [3, 4], {"mine": {"_target_": "a.B", "at": 5}}),
        (["~loss.weight", "callbacks.mine.at=7"], None, {"mine": {"_target_": "a.B", "at": 7}}),
        (["~callbacks.mine"], None, {}),
        ([], None, {}),
        (["~callbacks.mine", "+loss.weight=[5]"], [5], {}),
        (["+callbacks.mine._target_=c.D"], [5], {"mine": {"_target_": "c.D"}}),
    ]
    for given, weight, callbacks in resumes:
        job = ComposedConfig([f"resume={run}", *given])
        assert (job.cfg.loss.get("weight"), job.cfg.callbacks) == (weight, callbacks)
        saved.write_text(json.dumps(job.overrides))


def test_a_key_that_is_removed_from_a_sweep_that_goes_on_is_a_word_of_its_own(sweep, capsys):
    saved = sweep / "multirun.yaml"
    saved.write_text(saved.read_text().replace("data=tiny", "+loss.weight=[1,2]"))
    folder = f"hydra.sweep.dir={sweep}"
    whole = ["optimizer.lr=0.1,0.01", "loss.weight=[3,4]"]
    found = resumed.with_resumed_sweep(["-m", *whole, folder])
    assert found == ["-m", whole[0], "+loss.weight=[3,4]", folder], "the jobs are known by their words"
    assert resumed.with_resumed_sweep(["-m", "~loss.weight", folder]) == ["-m", "~loss.weight", folder]
    assert "typed with optimizer.lr=0.1,0.01, and these jobs are not" in capsys.readouterr().err


def test_a_run_that_is_resumed_in_its_own_folder_keeps_the_one_that_it_has_resumed_before(run):
    own = [f"resume={run}/checkpoints/last.pt", f"hydra.run.dir={run}"]
    found = resumed.with_resumed_overrides(own)
    assert found[-3:] == ["resume=elsewhere", *own]
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(found))
    assert resumed.with_resumed_overrides(own) == found
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(["resume=***", "optimizer.lr=0.1"]))
    assert resumed.with_resumed_overrides(own) == ["optimizer.lr=0.1", *own], (
        "a name that was hidden can't be read again"
    )


def test_relative_paths_of_a_resumed_run_are_in_the_folder_where_it_was_typed(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        (folder / "base").mkdir(parents=True)
        for name in ("a.jsonl", "b b.jsonl"):
            (folder / name).touch()
    run = there / "run"
    (run / ".hydra").mkdir(parents=True)
    words = ["data=text", "data.files=[a.jsonl,'b b.jsonl']", "+data.val_files=a.jsonl", "model.path=base"]
    words += ["data.tokenizer=gpt2", "data.name=a.jsonl", f"data.index={here / 'a.jsonl'}", "+data.table=not_there"]
    words += ["+data.train.csv=a.jsonl", "+data.train.labels=./a.jsonl", "+data.val.csv=a.jsonl"]
    words += ["+data.val.parts=[./a.jsonl,3]"]
    own = {"train": {"csv": f"{there}/a.jsonl", "labels": f"{there}/a.jsonl"}, "val": {"csv": "a.jsonl"}}
    (run / ".hydra" / "config.yaml").write_text(json.dumps({"data": own}))
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"cwd": str(there)}}}))
    monkeypatch.chdir(here)
    found = resumed.with_resumed_overrides([f"resume={run}", "data.index=a.jsonl"])
    assert found == [
        "data=text",
        f'data.files=[{there}/a.jsonl,"{there}/b b.jsonl"]',
        f"+data.val_files={there}/a.jsonl",
        f"model.path={there}/base",
        *("data.tokenizer=gpt2", "data.name=a.jsonl", "+data.table=not_there"),
        *(f"+data.train.csv={there}/a.jsonl", f"+data.train.labels={there}/a.jsonl"),
        *("+data.val.csv=a.jsonl", "+data.val.parts=[./a.jsonl,3]"),  # the job has left them as they were
        *(f"resume={run}", "data.index=a.jsonl"),
    ]
    assert parse_override(found[1]).value() == [f"{there}/a.jsonl", f"{there}/b b.jsonl"]
    monkeypatch.chdir(there)  # the job finds them
    assert resumed.with_resumed_overrides([f"resume={run}"])[: len(words)] == words
    (run / ".hydra" / "hydra.yaml").unlink()
    assert resumed.with_resumed_overrides([f"resume={run}"])[: len(words)] == words


def test_a_group_that_is_chosen_for_a_package_is_one_of_its_own(run, tmp_path):
    saved = tmp_path / "packages"
    words = ["transform@data.train.transform=mine", "data.train.transform.size=9", "transform@data.val.transform=mine"]
    words += ["data.val.transform.size=9", "optimizer.lr=0.1"]
    (saved / ".hydra").mkdir(parents=True)
    (saved / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    (saved / "checkpoints").mkdir()
    found = compose.read_words([f"resume={saved}", "transform@data.val.transform=eval"])
    assert found[:3] == [words[0], words[1], words[4]]
    assert len(found) == 6
    assert compose.read_words([f"resume={saved}", "data=digits", "optimizer=adam"])[:1] == [f"resume={saved}"]


def test_a_checkpoint_is_found_from_its_own_folder(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    *words, _, one = compose.read_words([f"resume={run}"])
    assert compose.read_words(["resume=last.pt"]) == [*words, "resume=last.pt", one]


@pytest.mark.parametrize(
    "name", ["lr=0.1, a", "a,b", "it's", 'a "b"', "[x]", "{y}", "a (1)", "${z}", "ä b", "plain-1", r"a\b", "a\\'b\\"]
)
def test_what_is_printed_to_type_can_be_pasted(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    for word in (*shlex.split(text.typed("resume", name)), f"resume={name}"):
        (found,) = compose.read_words([word])
        assert str(OmegaConf.create({"x": parse_override(found).value()}).x) == name


def test_the_words_of_a_resumed_run_stand_after_flags(run):
    found = compose.read_words(["-m", f"resume={run}", "optimizer.lr=0.1,0.2"])
    assert found == ["-m", "experiment=digits", "cluster.n_workers=4", "+model.extra=1", *found[4:]]
    assert len(found) == 6


def test_a_run_whose_results_were_elsewhere_may_go_on_here(run):
    saved = run / ".hydra" / "overrides.yaml"
    saved.write_text("- results.handler=cluster\n- results.root=s3://bucket/runs\n- detach=true\n- optimizer.lr=0.1\n")
    there = ["results.handler=cluster", "results.root=s3://bucket/runs", "optimizer.lr=0.1"]
    again = [f"resume={run}"]
    assert resumed.with_resumed_overrides(again) == there + again  # it does not detach, unless it is typed
    again.append("detach=true")
    assert resumed.with_resumed_overrides(again) == there + again
    here = ["results.handler=client", f"resume={run}"]
    assert resumed.with_resumed_overrides(here) == ["optimizer.lr=0.1", *here]


def test_a_secret_that_is_kept_nowhere_is_typed_again_to_resume(run):
    saved = run / ".hydra" / "overrides.yaml"
    saved.write_text("- optimizer.lr=0.1\n- +tracker.password=***\n- data.key='${oc.env:KEY}'\n")
    with pytest.raises(ConfigError, match=r"given \+tracker\.password, a secret.*type \+tracker\.password=<value>"):
        resumed.with_resumed_overrides([f"resume={run}"])
    again = [f"resume={run}", "+tracker.password=new"]
    assert resumed.with_resumed_overrides(again) == ["optimizer.lr=0.1", "data.key='${oc.env:KEY}'", *again]


def hydra_part(extra, *overrides):
    """Hydra's part of a config that was composed in `extra/..` from small.yaml and the folder `extra`."""
    searched = {"provider": "hydra.searchpath in command-line"}
    sources = [
        {"path": "hydra.conf", "schema": "pkg", "provider": "hydra"},
        {"path": f"{extra}/../extra", "schema": "file", "provider": "--config-dir"},
        {"path": str(extra), "schema": "file", "provider": "command-line"},
        {"path": "../more", "schema": "file", **searched},
        {"path": "app.conf", "schema": "pkg", **searched},
    ]
    runtime = {"cwd": str(extra.parent), "config_sources": sources}
    return {
        "job": {"config_name": "small"},
        "runtime": runtime,
        "overrides": {"task": ["seed=1,2"], "hydra": overrides},
    }


def places(extra):
    search = f"hydra.searchpath=[file://{extra.parents[1]}/more,pkg://app.conf]"
    return ["--config-name=small", f"--config-dir={extra}", search]


def test_a_resumed_run_has_its_main_config_and_its_folders_of_configs(run, tmp_path, capsys):
    (extra := tmp_path / "extra").mkdir()
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": hydra_part(extra)}))
    name, folder, search = places(extra)
    again = [f"resume={run}", "cluster=inline"]
    one = "hydra.mode=RUN"
    kept = ["experiment=digits", "optimizer.lr=0.1", "+model.extra=1"]
    assert compose.read_words(["-m", *again]) == [name, folder, "-m", *kept, search, *again]
    assert compose.read_words([*again, "-cn", "config"]) == [folder, "--config-name=config", *kept, search, *again, one]
    here = ["--config-dir=here", "hydra.searchpath=[]"]
    assert compose.read_words([*again, *here]) == [name, here[0], *kept, *again, here[1], one]
    extra.rmdir()
    assert compose.read_words(again) == [name, *kept, search, *again, one], "the folder may not be needed"
    said = f"resume={run}: the run was given --config-dir {extra}, which is not there: it goes on without; else type "
    assert said in capsys.readouterr().err
    assert compose.read_words([*again, *here]) == [name, here[0], *kept, *again, here[1], one]


def test_a_sweep_that_goes_on_has_its_main_config_and_its_folders_of_configs(tmp_path, capsys):
    (extra := tmp_path / "extra").mkdir()
    hydra = hydra_part(extra, "hydra.searchpath=[file://../more,pkg://app.conf]", "hydra.launcher.max_jobs=2")
    (tmp_path / "multirun.yaml").write_text(json.dumps({"hydra": hydra}))
    name, folder, search = places(extra)
    again, words = ["-m", f"hydra.sweep.dir={tmp_path}"], ["hydra.launcher.max_jobs=2", "seed=1,2", search]
    assert compose.read_words(again) == [name, folder, "-m", *words, again[1]]
    assert compose.read_words([*again, "--config-name=config"]) == [
        folder,
        "-m",
        "--config-name=config",
        *words,
        again[1],
    ]
    assert compose.read_words([*again, "seed=3"]) == [name, folder, "-m", search, "seed=3", again[1]]
    extra.rmdir()
    assert compose.read_words(again) == [name, "-m", *words, again[1]]
    assert f"{tmp_path}: the sweep was given --config-dir {extra}, which is not there" in capsys.readouterr().err


def test_from_python_a_resumed_run_has_its_configs_too(tmp_path, monkeypatch):
    contents = {"conf": "defaults: [config, _self_]\nseed: 7\n", "extra/experiment": "# @package _global_\n"}
    for folder, content in contents.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "small.yaml").write_text(content)
    monkeypatch.chdir(tmp_path)
    started = ComposedConfig(["experiment=small", "hydra.searchpath=[file://extra]", "hydra.run.dir=run"], "small")
    started.save()
    assert ComposedConfig(["resume=run"]).cfg.seed == 7
    assert ComposedConfig(["resume=run"], "config").cfg.seed == 0
    found = compose.compose(["--config-dir=extra", "experiment=small", "hydra.run.dir=other"])
    assert typed_sources(OmegaConf.to_container(found.hydra)) == [f"--config-dir={tmp_path}/extra"]


def env_of(run, *overrides, **variables):
    hydra = {"overrides": {"hydra": list(overrides)}, "job": {"env_set": variables}}
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": hydra}))


def test_a_resumed_run_has_its_variables_and_those_typed_now_win(run, capsys, monkeypatch):
    again, words = f"resume={run}", ["+hydra.job.env_set={A: 4, TOKEN: ***}", "+hydra.job.env_set.B=x"]
    env_of(run, *words, "hydra.run.dir=there", "hydra.mode=RUN")
    kept = compose.read_words([again])
    assert [word for word in kept if "env_set" in word] == ["+hydra.job.env_set.A=4", words[1]]
    said = f"resume={run}: the run was given hydra.job.env_set.TOKEN, a secret, which is kept nowhere: it goes on"
    assert f"{said} without; else set TOKEN=<value> in front of the command" in capsys.readouterr().err
    for word, env in (
        ("hydra.job.env_set={A: 5}", {"A": "5", "B": "x"}),
        ("+hydra.job.env_set={A: 5, C: 6}", {"A": "5", "B": "x", "C": "6"}),
        ("hydra.job.env_set.B=5", {"A": "4", "B": "5"}),
        ("+hydra.job.env_set.B=5", {"A": "4", "B": "5"}),
        ("~hydra.job.env_set.B", {"A": "4"}),
    ):
        composed = compose.compose([one for one in compose.read_words([again, word]) if "env_set" in one])
        assert composed.hydra.job.env_set == env
    capsys.readouterr()
    compose.read_words([again, "+hydra.job.env_set={TOKEN: x}"])
    monkeypatch.setenv("TOKEN", "mine")
    compose.read_words([again])
    assert capsys.readouterr().err == ""


def test_variables_that_hydra_has_copied_for_a_run_are_taken_again_as_they_were(monkeypatch):
    secret = "postgres://***@h/db"
    job = {"env_copy": ["A", "MISSING", "TOKEN"], "env_set": {"A": "${x}/3", "B": "2", "TOKEN": secret}}
    saved = {"job": job, "overrides": {"hydra": ["hydra.verbose=true", "+hydra.job.env_set.B=2"]}}
    copied = [r'++hydra.job.env_set.A="\${x}/3"', f"++hydra.job.env_set.TOKEN={text.quoted(secret)}"]
    assert typed_sources(saved) == [*copied, "hydra.job.env_copy=[]", "+hydra.job.env_set.B=2"]
    monkeypatch.setenv("TOKEN", "t")
    assert typed_sources(saved) == [*copied, "hydra.job.env_copy=[TOKEN]", "+hydra.job.env_set.B=2"]
    again = {
        "job": {"env_set": {"A": "1"}},
        "overrides": {"hydra": ["++hydra.job.env_set.A=1", "hydra.job.env_copy=[]"]},
    }
    assert typed_sources(again) == ["hydra.job.env_copy=[]", "++hydra.job.env_set.A=1"]
    for odd in (None, "A", [], {"A": 1}, ["B"]):
        assert typed_sources({"job": {"env_copy": odd, "env_set": {"A": "1"}}}) == []


@pytest.mark.medium
def test_a_resume_copies_no_variable_anew(run, capsys, monkeypatch, tmp_path):
    (tmp_path / "copying").mkdir()
    (tmp_path / "copying/config.yaml").write_text("defaults: [job, _self_]\nhydra: {job: {env_copy: [A]}}\n")
    hydra = {"job": {"env_copy": ["A"], "env_set": {"A": "1"}}, "overrides": {"hydra": []}}
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": hydra}))
    place = f"--config-dir={tmp_path / 'copying'}"

    def copied(*more: str) -> dict[str, str]:
        words = compose.read_words([place, f"resume={run}", *more])
        return dict(compose.compose([word for word in words if "env_" in word or word == place]).hydra.job.env_set)

    monkeypatch.delenv("A", raising=False)
    assert copied() == {"A": "1"}
    monkeypatch.setenv("A", "2")
    assert (copied(), "A=1, as the run had it, and not 2 of the shell" in capsys.readouterr().err) == ({"A": "1"}, True)
    assert copied("hydra.job.env_set.A=3") == {"A": "3"}
    assert copied("hydra.job.env_copy=[A]") == {"A": "2"}


def test_a_sweep_that_goes_on_has_its_variables(tmp_path):
    word = "+hydra.job.env_set={A: 4}"
    (tmp_path / "multirun.yaml").write_text(json.dumps({"hydra": hydra_part(tmp_path, word)}))
    for more in ([], ["seed=3"]):
        words = compose.read_words(["-m", f"hydra.sweep.dir={tmp_path}", *more])
        assert words.count(word) == 1


def test_a_variable_of_a_resumed_run_wins_over_the_one_that_the_shell_sets(run, capsys, monkeypatch):
    ours = {"A": "mine", "B": "x", "PLACES": "here", "URL": "s3://me:mine@b", "AWS_TOKEN": "t", "D": "1e3", "E": "a b"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    places = "+hydra.job.env_set.PLACES='${oc.env:PLACES}:there'"
    words = ["+hydra.job.env_set={A: 4, B: x, D: 5, AWS_TOKEN: ***}", places, "+hydra.job.env_set={URL: new, E: e}"]
    env_of(run, *words)
    again = [f"resume={run}"]
    kept = [word for word in compose.read_words(again) if "env_set" in word]
    assert kept == [*(f"+hydra.job.env_set.{one}" for one in ("A=4", "B=x", "D=5")), *words[1:]]
    assert capsys.readouterr().err.splitlines() == [
        "ddp_hydra: A=4, as the run had it, and not mine of the shell: type hydra.job.env_set.A=mine for that",
        "ddp_hydra: D=5, as the run had it, and not 1e3 of the shell: type 'hydra.job.env_set.D=\"1e3\"' for that",
        "ddp_hydra: URL=new, as the run had it, and not s3://***@b of the shell: "
        "type hydra.job.env_set.URL=<value> for that",
        "ddp_hydra: E=e, as the run had it, and not a b of the shell: type 'hydra.job.env_set.E=\"a b\"' for that",
    ]
    for word, env in (
        ("hydra.job.env_set.A=mine", {"A": "mine"}),
        ("+hydra.job.env_set={A: 6}", {"A": "6"}),
        ('hydra.job.env_set.D="1e3"', {"D": "1e3"}),
        ("~hydra.job.env_set.A", {"A": None}),
    ):
        found = compose.compose([one for one in compose.read_words([*again, word]) if "env_set" in one])
        assert {name: found.hydra.job.env_set.get(name) for name in env} == env
        assert not any(f" {name}=" in capsys.readouterr().err for name in env)


def test_a_variable_of_a_sweep_wins_over_the_one_that_the_shell_sets(tmp_path, monkeypatch, capsys):
    word = "+hydra.job.env_set={A: 4}"
    (tmp_path / "multirun.yaml").write_text(json.dumps({"hydra": hydra_part(tmp_path, word)}))
    monkeypatch.setenv("A", "5")
    assert word in compose.read_words(["-m", f"hydra.sweep.dir={tmp_path}"])
    said = "ddp_hydra: A=4, as the sweep had it, and not 5 of the shell: type hydra.job.env_set.A=5 for that\n"
    assert capsys.readouterr().err.startswith(said)


def test_the_variables_of_a_run_are_set_for_what_its_model_does(run, capsys, monkeypatch):
    ours = {"A": "3", "B": "4", "PLACE": "here", "DB_PASSWORD": "mine", "CUDA_VISIBLE_DEVICES": "1"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    (run / ".hydra" / "config.yaml").write_text("seed: 7\n")
    own = {"P": "${oc.env:PLACE}/x", "PLACE": "${oc.env:PLACE}:y", "S": "${seed}", "C": "4"}
    env_of(run, A="4", B="4", **own, TOKEN="***", DB_PASSWORD="***", N="${nowhere}", CUDA_VISIBLE_DEVICES="0")
    with resumed.environment_of(str(run)) as found:
        assert found == {"A": "4", "B": "4", "P": "here/x", "PLACE": "here:y", "S": "7", "C": "4"}
        assert {name: os.environ[name] for name in found} == found
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert (os.environ["A"], os.environ["PLACE"]) == ("3", "here")
    assert "P" not in os.environ
    said = "ddp_hydra: A=4, as the run had it, and not 3 of the shell: type hydra.job.env_set.A=3 for that"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == said
    assert [line.removeprefix("ddp_hydra: ")[:40] for line in lines[1:]] == [
        *(f"run={run}: the run was given hydra.job.env_set.TOKEN"[:40], f"run={run}: hydra.job.env_set.N"[:40]),
    ]
    with resumed.environment_of(str(run), typed=None):
        said = f"ddp_hydra: A=4, as {run} had it, and not 3 of the shell"
        assert capsys.readouterr().err.splitlines()[0] == said
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with resumed.environment_of(str(run)) as found:
        assert found["CUDA_VISIBLE_DEVICES"] == "0"
    (lone := run.parent / "lone.pt").touch()
    for other in (lone, run.parent / "none", f"file://{run}/.."):
        with resumed.environment_of(str(other)) as found:
            assert found == {}
        with resumed.environment_of(str(other), typed=["hydra.job.env_set.A=1"]) as found:
            assert found == {"A": "1"}
    env_of(run, A="4", B="4")
    capsys.readouterr()
    monkeypatch.setattr(resumed.RunRef, "is_own", property(lambda self: False))  # as of a run in a bucket
    with resumed.environment_of(str(run), typed=["hydra.job.env_set.A=1"]) as found:
        assert found == {"A": "1"}
    said = f"ddp_hydra: run={run} was given hydra.job.env_set.B, which is not set here: give it, or "
    assert capsys.readouterr().err == f"{said}trust=true if you trust it\n"


@pytest.mark.parametrize(
    ("word", "env"),
    [
        ("hydra.job.env_set.A=3", {"A": "3", "B": "4"}),
        ("+hydra.job.env_set.A='${seed}'", {"A": "7", "B": "4"}),
        ("++hydra.job.env_set={A: 5, C: '6'}", {"A": "5", "B": "4", "C": "6"}),
        ("~hydra.job.env_set.A", {"B": "4"}),
    ],
)
def test_typed_variables_win_over_those_of_a_run(run, capsys, monkeypatch, word, env):
    monkeypatch.setenv("A", "3")
    (run / ".hydra" / "config.yaml").write_text("seed: 7\n")
    env_of(run, A="4", B="4")
    others, of_variables = resumed.without_variables(["seed=1", word])
    assert others == ["seed=1"]
    with resumed.environment_of(str(run), typed=of_variables) as found:
        assert found == env
        assert os.environ["A"] == env.get("A", "3")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rest", ["=3", ".A=1,2", ".A={", ""])
def test_words_that_set_no_variable_are_refused(rest):
    word = f"hydra.job.env_set{rest}" if rest else "~hydra.job.env_set"
    with pytest.raises(ConfigError, match=f"^{re.escape(word)} sets no variable: give hydra.job.env_set.<name>="):
        resumed.without_variables([word])


@pytest.mark.parametrize("rest", [".A=[1,2]", ".A={x: 1}", "={A: [1]}"])
def test_a_variable_that_is_no_text_is_refused(rest):
    word = f"hydra.job.env_set{rest}"
    with pytest.raises(ConfigError, match=f"^{re.escape(word)}: a variable is a text: put its value in quotes$"):
        resumed.without_variables([word])
    assert resumed.without_variables(['hydra.job.env_set.A="[1,2]"'])[0] == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("A", "${oc.env:NO_SUCH}", "${oc.env:NO_SUCH}"),
        ("TOKEN", "abc${oc.env:NO_SUCH}", "***"),
        ("URL", "s3://u:pw@h/${oc.env:NO_SUCH}", "s3://***@h/${oc.env:NO_SUCH}"),
    ],
)
def test_a_variable_that_is_typed_needs_its_value(run, monkeypatch, name, value, shown):
    monkeypatch.delenv("NO_SUCH", raising=False)
    said = f"^{re.escape(f'hydra.job.env_set.{name}={shown}')}: Environment variable 'NO_SUCH' not found$"
    with pytest.raises(ConfigError, match=said):
        resumed.environment_of(str(run), typed=[f"hydra.job.env_set.{name}={value}"])


@pytest.mark.parametrize("content", ["hydra: [", "- 1", "hydra: {job: {env_set: {A: '${'}}}", None])
def test_a_run_whose_own_part_of_hydra_cannot_be_read_sets_no_variables(run, capsys, content):
    file = run / ".hydra" / "hydra.yaml"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with resumed.environment_of(str(run)) as found:
        assert found == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ddp_hydra: run={run}: its variables (hydra.job.env_set) can't be read, and are not set: ")


@pytest.mark.parametrize("content", ["hydra: [1]", "hydra: {job: [1]}", "hydra: {job: {env_set: [1]}}", ""])
def test_a_run_that_has_kept_no_variables_sets_none(run, capsys, content):
    (run / ".hydra" / "hydra.yaml").write_text(content)
    with resumed.environment_of(str(run)) as found:
        assert found == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("more", "is_one"),
    [
        ([], True),
        (["seed=1"], True),
        (["data.sizes=[1,2]"], True),
        (["-m"], False),
        (["hydra.mode=MULTIRUN"], False),
        (["experiment=x"], False),
        (["trainer.epochs=2,3"], False),
        (["trainer.epochs=range(2,4)"], False),
    ],
)
def test_a_resume_is_one_run_also_where_the_config_makes_sweeps(run, more, is_one):
    assert ("hydra.mode=RUN" in compose.read_words([f"resume={run}", *more])) == is_one
    assert "hydra.mode=RUN" not in compose.read_words(["resume=null", "seed=1"])


@pytest.mark.parametrize("junk", [[], "x", {"config_sources": ["x", {}], "config_name": 1}])
def test_a_damaged_config_says_nothing_of_where_configs_are(junk):
    assert typed_sources({"job": junk, "runtime": junk, "overrides": junk}) == []
    assert typed_sources({"overrides": {"hydra": junk}}) == []


@pytest.fixture
def sweep(tmp_path):
    task = ["data=tiny", "optimizer.lr=0.1,0.01"]
    before = {
        "hydra": {
            "overrides": {"task": task, "hydra": ["hydra.launcher.max_jobs=2", f"hydra.sweep.dir={tmp_path}"]},
            "job": {},
        }
    }
    OmegaConf.save(OmegaConf.create(before), tmp_path / "multirun.yaml")
    return tmp_path


@pytest.mark.parametrize("key", ["hydra.sweep.dir", "hydra.launcher.resume"])
def test_the_folder_of_a_sweep_alone_goes_on_with_it(sweep, key):
    found = compose.read_words(["-m", f"{key}={sweep}", "hydra.launcher.retry_failed=true"])
    assert found == [
        "-m", "hydra.launcher.max_jobs=2", "data=tiny", "optimizer.lr=0.1,0.01", "hydra.launcher.retry_failed=true",
        f"hydra.sweep.dir={sweep}",
    ]  # fmt: skip


def test_the_mode_of_hydra_makes_a_sweep_too(sweep):
    found = resumed.with_resumed_sweep(["hydra.mode=MULTIRUN", f"hydra.sweep.dir={sweep}"])
    assert "data=tiny" in found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", r"an empty multirun\.yaml: type the words of the sweep, too"),
        ("hydra: {", r"multirun\.yaml is damaged \("),
        ("hydra:\n  mode: x\n", r"multirun\.yaml is damaged \(it holds no words, or not all\)"),
        ("hydra:\n- a\n", r"is damaged \(it holds no words"),
        ("hydra:\n  overrides:\n  - x\n", r"is damaged \(it holds no words"),
        ("hydra:\n  overrides:\n    hydra: []\n    task:\n    - a=1\n    -", r"is damaged \(it holds no words"),
        ("hydra:\n  overrides:\n    hydra: []\n    task:\n    - a=1\n    - opt", r"is damaged \(it holds no words"),
    ],
)
def test_the_words_of_a_sweep_that_were_cut_off_are_typed_again(sweep, content, said):
    (sweep / "sweep.json").touch()
    (sweep / "multirun.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        resumed.with_resumed_sweep(["-m", f"hydra.sweep.dir={sweep}"])


def test_what_is_given_with_the_folder_of_a_sweep_is_the_whole_sweep(sweep, capsys):
    found = resumed.with_resumed_sweep(["-m", "optimizer.lr=1,2", f"hydra.launcher.resume={sweep}"])
    assert found == ["-m", "optimizer.lr=1,2", f"hydra.sweep.dir={sweep}"]
    assert "the sweep was typed with data=tiny, and these jobs are not: type it again" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["hydra.launcher.retry_failed=true"], ["hydra.verbose=true"]])
def test_a_sweep_that_has_kept_no_words_is_not_another_one(tmp_path, more):
    (tmp_path / "sweep.json").touch()
    words = ["-m", f"hydra.sweep.dir={tmp_path}", *more]
    with pytest.raises(ConfigError, match=r"has a sweep, but no multirun\.yaml: type the words of the sweep, too"):
        resumed.with_resumed_sweep(words)
    for own in ("seed=1,2", "--config-name=search", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "~mix"):
        assert resumed.with_resumed_sweep([*words, own]) == [*words, own]


@pytest.mark.parametrize(
    ("name", "content"),
    [("overrides.yaml", "x: 1"), ("overrides.yaml", ""), ("overrides.yaml", "a: ["), ("hydra.yaml", "- x")],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, content):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- seed=1")
    (tmp_path / ".hydra" / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/.hydra/{name} is damaged \("):
        resumed.with_resumed_overrides([f"resume={tmp_path}"])


@pytest.mark.parametrize("content", ["a: [", "- x", "\udcff"])
def test_a_damaged_config_of_a_run_is_named(tmp_path, content):
    (tmp_path / ".hydra").mkdir()
    file = tmp_path / ".hydra" / "config.yaml"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"{file} is damaged \("):
        saved_config(str(tmp_path))
    file.write_text("")
    assert saved_config(str(tmp_path)) is None


def test_a_secret_of_a_sweep_is_typed_again_too(sweep):
    saved = sweep / "multirun.yaml"
    saved.write_text(saved.read_text().replace("data=tiny", "cluster.password=***"))
    folder = f"hydra.sweep.dir={sweep}"
    with pytest.raises(ConfigError, match=r"given cluster\.password, .*type cluster\.password=<value> with"):
        resumed.with_resumed_sweep(["-m", folder])
    again = ["-m", "optimizer.lr=0.1,0.01", "cluster.password=new"]
    assert resumed.with_resumed_sweep([*again, folder]) == [*again, f"hydra.sweep.dir={sweep}"]


@pytest.mark.parametrize(
    ("arguments", "is_sweep"),
    [
        (["hparams_search=x"], True),
        (["experiment=y", "+hparams_search=x"], True),
        (["hparams_search=x", "--cfg", "job"], False),
        (["hparams_search=x", "-c=job"], False),
        (["--info", "config", "hparams_search=x"], False),
        (["hparams_search=x", "-r"], False),
        (["hparams_search=null"], False),
    ],
)
def test_a_search_is_a_sweep(arguments, is_sweep):
    assert compose.with_search(arguments) == arguments + ["--multirun"] * is_sweep
    assert compose.with_search(["-m", *arguments]) == ["-m", *arguments]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["optimizer.lr=1", "debug=faults"], ["optimizer.lr=1", "debug=faults"]),
        (["+fault=kill,rank=1,step=20", "a=1"], ["a=1", "faults=['kill,rank=1,step=20']"]),
        (['+fault="kill,rank=1"'], ["faults=['kill,rank=1']"]),
        (["+fault=?"], ["faults=['?']"]),
        (["+fault=kill,step=5", "x=1", "+fault=hang,at=load"], ["x=1", "faults=['kill,step=5','hang,at=load']"]),
        (["+faults=[kill]", "default=1"], ["+faults=[kill]", "default=1"]),
    ],
)
def test_faults_are_typed_without_quotes(arguments, seen):
    assert compose.with_faults(arguments) == seen
    *_, override = OverridesParser.create().parse_overrides(seen)
    assert not override.is_sweep_override()


def test_the_faults_of_a_resumed_run_do_not_strike_again(run):
    with (run / ".hydra" / "overrides.yaml").open("a") as file:
        file.write("- faults=['kill,rank=1,step=20']\n")
    found = compose.with_faults(resumed.with_resumed_overrides([f"resume={run}"]))
    assert not [word for word in found if word.startswith("faults=")]
    found = compose.with_faults(resumed.with_resumed_overrides([f"resume={run}", "+fault=hang,step=30"]))
    assert [word for word in found if word.startswith("faults=")] == ["faults=['hang,step=30']"]
    assert {"experiment=digits", f"resume={run}"} <= set(found)


def test_keys_to_search_may_be_given_as_a_dict():
    arguments = ["-m", "hydra.sweeper.params={optimizer.lr: 'choice(0.1,0.2)', seed: 3}", "seed=1"]
    assert compose.with_params(arguments) == ["-m", "optimizer.lr=choice(0.1,0.2)", "seed=3", "seed=1"]
    for wrong in ("{optimizer: {lr: 1}}", "3"):
        with pytest.raises(ConfigError, match=r"give \{optimizer\.lr: '0\.1,0\.01'\}"):
            compose.with_params(["-m", f"hydra.sweeper.params={wrong}"])


def test_options_may_be_typed_amid_overrides():
    given = ["a=1", "-m", "~b", "--cfg", "job", "+c=2", "--config-dir=d=e"]
    assert compose.with_options_first(given) == ["-m", "--cfg", "job", "--config-dir=d=e", "a=1", "~b", "+c=2"]


def test_the_value_of_an_option_is_no_override():
    found = compose.read_words(["seed=1", "--config-dir", "a=b", "-cn", "c", "-m"])
    assert found == ["--config-dir=a=b", "--config-name=c", "-m", "seed=1"]
    assert compose.with_joined_values(["--config-name", "-m"]) == ["--config-name", "-m"]
    given, overrides = get_args_parser().parse_known_args(found)
    assert (given.config_dir, given.config_name, given.overrides, overrides) == ("a=b", "c", ["seed=1"], [])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["a=1", "--info"], ["--info=all", "a=1"]),
        (["-i", "a=1"], ["--info=all", "a=1"]),
        (["--info", "~b"], ["--info=all", "~b"]),
        (["a=1", "-i", "defaults", "-m"], ["--info=defaults", "-m", "a=1"]),
        (["--info=config", "a=1"], ["--info=config", "a=1"]),
        (["-i", "-m"], ["--info=all", "-m"]),
    ],
)
def test_what_follows_an_option_with_an_optional_value_may_be_an_override(given, found):
    assert compose.read_words(given) == found
    get_args_parser().parse_args(found)


def test_a_path_with_a_comma_can_be_resumed_by_a_sweep(tmp_path, monkeypatch):
    (tmp_path / "a,b/.hydra").mkdir(parents=True)
    (tmp_path / "a,b/.hydra/overrides.yaml").write_text("- optimizer.lr=0.5\n")
    monkeypatch.chdir(tmp_path)
    assert compose.read_words(["-m", "resume=a,b", "seed=1,2"]) == [
        "-m",
        "optimizer.lr=0.5",
        'resume="a,b"',
        "seed=1,2",
    ]


@pytest.mark.medium
@pytest.mark.parametrize("is_typed", [False, True])
def test_folders_to_search_win_over_what_ships_and_the_project_over_them(is_typed, tmp_path, monkeypatch):
    place = f"hydra.searchpath=[file://{tmp_path}/team]"
    for folder in ("team", "conf"):
        (tmp_path / folder / "optimizer").mkdir(parents=True)
        (tmp_path / folder / "optimizer/adam.yaml").write_text(f"{{_target_: x, name: {folder}}}\n")
    (tmp_path / "team/optimizer/sgd.yaml").write_text("{_target_: x, name: team}\n")
    (tmp_path / "conf/main.yaml").write_text(
        "defaults: [config, _self_]\n"
        if is_typed
        else f"defaults: [config, _self_]\nhydra: {{searchpath: ['file://{tmp_path}/team']}}\n"
    )
    monkeypatch.chdir(tmp_path)
    for option, name in (("sgd", "team"), ("adam", "conf")):
        words = ["--config-name=main", f"optimizer={option}"]
        assert compose.compose([*words, *[place] * is_typed]).optimizer.name == name


def test_of_two_runs_to_resume_the_last_one_counts(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- tags=[{name}]\n")
    words = [f"resume={tmp_path}/{name}" for name in ("a", "b")]
    assert resumed.with_resumed_overrides(words) == ["tags=[b]", *words]


@pytest.mark.parametrize("words", [[], ["resume="], ["resume=/nowhere/at/all"], ["-m", "hydra.sweep.dir=/nowhere"]])
def test_other_words_stay_as_they_are(words):
    assert compose.read_words(words) == words
    assert compose.read_words([*words, "model.weights=./run"]) == [*words, "++model.weights=./run"], "of any model"
