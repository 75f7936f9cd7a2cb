from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException, MissingConfigException

from ddp_hydra import __version__
from ddp_hydra.api import ComposedConfig
from ddp_hydra.cli import main
from ddp_hydra.config.schema import resolved
from ddp_hydra.errors import ConfigError, Interrupted
from tests.ddp_hydra.config.configs import composed

ROOT = Path(__file__).parents[3]


def raising(error: BaseException):
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("data.batch_size=0: give more"), 1, "ddp_hydra: data.batch_size=0: give more\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Interrupted("interrupted; saved at step 3: go on with resume=x"), 130, "interrupted; saved at step 3: go on"),
        (MissingConfigException("?", "hydra/sweeper/optuna"), 1, "type pip install 'ddp-hydra[optuna]'\n"),
        (MissingConfigException("no such app", "app"), 1, "ddp_hydra: no such app\n"),
        (
            MissingConfigException("a page of search path", "metrics/r2"),
            1,
            "ddp_hydra: metrics=r2 is not an option; ddp-hydra --help lists the options\n",
        ),
        (
            MissingConfigException("no such model", "model/resnet19", ["lstm", "resnet18"]),
            1,
            "ddp_hydra: model=resnet19 is not an option: did you mean model=resnet18? The options are lstm, resnet18\n",
        ),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops"),
    ],
)
def test_errors_are_told_in_a_sentence_and_become_exit_codes(error, code, said, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert main.report(raising(error)) == code
    assert said in capsys.readouterr().err
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lrr=3"], r"^optimizer.lrr: there is no such key: did you mean optimizer.lr\?"),
        (["model=resnet81"], r"^model=resnet81 is not an option: did you mean model=resnet18\?"),
        (["trainer.epochs=three"], "^trainer.epochs=three: give a whole number of at least 1, or null$"),
        (
            ["optimizer.lr=[1"],
            r"^optimizer.lr=\[1: this is no override \(.*\): quote the value, 'optimizer.lr=\"\[1\"'$",
        ),
        (
            ["optimizer.lr=${oc.decode:${oc.env:X}}"],
            r"quote the value, 'optimizer.lr=\"\$\{oc\.decode:\$\{oc\.env:X\}\}\"'$",
        ),
        (["trainer.freeze=[*,!a.2.*]"], r"quote the items, 'trainer.freeze=\[\"\*\",\"!a.2.\*\"\]'$"),
        (
            ["optimizer.lr=${nope:1}"],
            r"^optimizer.lr=\$\{nope:1\}: Unsupported interpolation type nope: give \$\{<key>\}",
        ),
        (["data=broken"], "^conf/data/broken.yaml, line 2: this is no YAML: expected"),
    ],
)
def test_a_mistake_in_a_config_is_a_sentence_with_its_key_or_its_file_also_from_python(
    words, said, tmp_path, monkeypatch
):
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "broken.yaml").write_text("a: [1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        resolved(ComposedConfig(words).cfg)


@pytest.mark.medium
def test_a_resume_in_another_folder_that_lacks_an_option_names_the_folder_of_the_run(tmp_path, monkeypatch, capsys):
    run, here, there = tmp_path / "run", tmp_path / "here", tmp_path / "there"
    (run / ".hydra").mkdir(parents=True)
    (here / "conf/model").mkdir(parents=True)
    (here / "conf/model/other.yaml").touch()
    (run / ".hydra/overrides.yaml").write_text("- model=tiny\n")
    (run / ".hydra/hydra.yaml").write_text(f"hydra: {{runtime: {{cwd: {there}}}}}\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(here))
    said = f". The run that resume={run} continues was typed in {there}: type the command there"
    with pytest.raises(ConfigError, match=r"^model=tiny is not an option") as caught:
        ComposedConfig([f"resume={run}"])
    assert str(caught.value).endswith(said)
    with pytest.raises(ConfigError, match=r"^model=tinny is not an option") as caught:
        ComposedConfig([f"resume={run}", "model=tinny"])
    assert said not in str(caught.value)

    error = MissingConfigException("no such model", "model/tiny", ["other"])
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", "model=tiny", f"resume={run}"])
    assert main.error_message(error).endswith(said)
    (run / ".hydra/hydra.yaml").write_text(f"hydra: {{runtime: {{cwd: {here}}}}}\n")
    assert main.error_message(error).endswith("The options are other")


@pytest.mark.parametrize("words", [["-cp", "conf"], ["seed=1,2", "-m", "--config-path=conf"]])
def test_a_main_folder_that_no_run_keeps_is_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", *words])
    assert main.report(main.compose_and_run) == 1
    assert "--config-path=conf: the main folder of configs is the project's conf: give --con" in capsys.readouterr().err


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "resume=a,b", "seed=1,2"], "resume can't be swept"),
        (["-m", "resume=glob(*)"], "resume can't be swept"),
        (["-m", "resume=choice(a,b)", "hydra/sweeper=optuna"], "resume can't be swept"),
        (["-m", "hydra.sweeper.params={resume: 'a,b'}"], "resume can't be swept"),
        (["-cn", "sweep"], "resume can't be swept"),
        (["hydra.output_subdir=null"], "hydra.output_subdir=null: resume=<run> reads .hydra: leave it out"),
        (["-m", "seed=1,2", "hydra.output_subdir=x"], "hydra.output_subdir=x: resume=<run> reads .hydra: leave it out"),
    ],
)
def test_runs_that_could_not_go_on_with_their_words_are_refused(words, said, monkeypatch, capsys, tmp_path):
    (tmp_path / "conf").mkdir()
    swept = "{mode: MULTIRUN, sweeper: {params: {resume: 'a,b'}}}"
    (tmp_path / "conf/sweep.yaml").write_text(f"defaults: [job, _self_]\nhydra: {swept}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", *words])
    assert main.report(main.compose_and_run) == 1
    assert capsys.readouterr().err.startswith(f"ddp_hydra: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_a_word_that_is_no_command_names_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", "evaluates"])
    with pytest.raises(SystemExit):
        main.entry()
    assert "'evaluates' is no command, nor key=value: did you mean evaluate? The" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-m"], ["--config-dir=conf"], ["--cfg", "job"], ["seed=1"]])
def test_a_command_that_does_not_come_first_is_told_so(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", *words, "predict", "run=a"])
    with pytest.raises(SystemExit):
        main.entry()
    said = capsys.readouterr().err
    assert said.startswith("ddp_hydra: predict is a command, and a command comes first: type ddp-hydra predict …;")
    assert "has the run's own configs" in said


def test_the_version_is_ours(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", "--version"])
    main.entry()
    assert capsys.readouterr().out.startswith(f"ddp_hydra {__version__}, hydra-core ")


def run_job():
    Path("file/run").mkdir(parents=True)


def read_config():
    Path("nowhere/config.yaml").read_text()


@pytest.mark.parametrize("fails", [run_job, read_config])
def test_only_a_run_directory_that_cannot_be_made_is_told_so(fails, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    advice = "give another with hydra.run.dir=<folder>"
    assert main.report(fails) == 1
    assert advice not in capsys.readouterr().err, "of ddp-hydra runs, generate and others, which make none"
    monkeypatch.setattr(main.hydra, "main", lambda **_: lambda task: fails)
    monkeypatch.setattr(main.project, "make_importable", lambda layers: None)
    monkeypatch.setattr(sys, "argv", ["ddp-hydra"])
    assert main.report(main.compose_and_run) == 1
    said = capsys.readouterr().err
    assert (advice in said) == (fails is run_job), said
    assert "file" in said or "nowhere/config.yaml" in said


@pytest.mark.medium
def test_a_key_that_hydra_does_not_know_is_told_with_the_one_that_may_be_meant(capsys):
    with pytest.raises(ConfigCompositionException) as caught:
        composed("modle=resnet18")
    assert main.report(raising(caught.value)) == 1
    said = "modle: there is no such key: did you mean model? The keys are cluster, data, model, adapter, sampler"
    assert said in capsys.readouterr().err


@pytest.mark.medium
def test_a_group_that_is_given_null_is_told_with_how_to_leave_it_out(capsys):
    with pytest.raises((ValueError, ConfigCompositionException)) as caught:
        composed("experiment=null")
    assert main.report(raising(caught.value)) == 1
    said = capsys.readouterr().err
    assert "Config group override must be a string or a list. Got NoneType: give the name of an option" in said
    assert "'~<group>' to leave a group out" in said


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["-m", "seed=1,2", "--cfg", "job"],
            "Only one of --run, --multirun, --cfg, --info and --shell_completion can be",
        ),
        (["--resolve"], "The --resolve flag can only be used in conjunction with --cfg or --help"),
    ],
)
def test_options_that_do_not_go_together_are_told_in_hydras_sentence(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", *words])
    assert main.report(main.compose_and_run) == 1
    assert capsys.readouterr().err.startswith(f"ddp_hydra: {said}")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "key"), [(["~dry_run"], "dry_run"), (["--config-name=mine"], "cluster"), (["~objective"], "objective")]
)
def test_a_job_without_a_key_of_every_job_is_a_sentence(words, key, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text("defaults: [data: digits, _self_]\n")
    command = [sys.executable, "-m", "ddp_hydra", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ddp_hydra: {key} is missing: leave '~{key}' out; a main config of your own needs")
    assert "Traceback" not in done.stderr


def test_hydra_full_error_shows_the_traceback_of_a_users_mistake(capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main.report(raising(ConfigError("no"))) == 1
    assert "Traceback" in capsys.readouterr().err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_hydra_does_not_print_all_overrides_above_a_sentence(capsys):
    refused = JobReturn(overrides=["a=1"], status=JobStatus.FAILED, _return_value=ConfigError("a=1: give more"))

    def read() -> None:
        with main.errors_raised():
            assert JobReturn(status=JobStatus.COMPLETED, _return_value=3).return_value == 3
            _ = refused.return_value

    assert main.report(read) == 1
    assert capsys.readouterr().err == "ddp_hydra: a=1: give more\n"
    assert JobReturn(status=JobStatus.COMPLETED, _return_value=3).return_value == 3
    with pytest.raises(ConfigError):
        _ = refused.return_value
    assert "Error executing job" in capsys.readouterr().err, "apps of others are told things as Hydra does"


WINDOWS = "import runpy, sys; sys.platform, sys.argv[:] = 'win32', [{word!r}]; {what}"


@pytest.mark.parametrize(
    ("word", "what", "said"),
    [
        ("-c", "import ddp_hydra", "ImportError: ddp_hydra runs on Linux and macOS: on Windows, install it in WSL"),
        ("C:/Scripts/ddp-hydra.exe", "import ddp_hydra.__main__", "ddp_hydra: ddp_hydra runs on Linux and macOS"),
    ],
)
def test_windows_is_told_in_a_sentence(word, what, said):
    command = [sys.executable, "-c", WINDOWS.format(word=word, what=what)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(said)
    assert "cluster=remote cluster.address=tcp://" in last
    assert ("Traceback" in ended.stderr) is (word == "-c")


def test_a_command_whose_output_is_not_whole_fails_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", "runs", "--help"])
    assert main.report(main.run_command) == 0
    monkeypatch.setattr(main.signals, "unwritten", lambda: OSError(errno.ENOSPC, "No space left on device"))
    said = "ddp_hydra: cannot write standard output: No space left on device; free some space there"
    for words in (["runs", "--help"], ["evaluate", "--help"]):  # the second one ends by sys.exit(0)
        monkeypatch.setattr(sys, "argv", ["ddp-hydra", *words])
        assert main.report(main.run_command) == 1
        assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", "runs", "nothing"])
    assert main.report(main.run_command) == 1
    assert "there is no such command" in capsys.readouterr().err, "a mistake goes before it"


@pytest.mark.medium
@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job"]])
def test_a_config_that_is_shown_is_a_result_too(words, monkeypatch, capsys):
    monkeypatch.setattr(main.signals, "unwritten", lambda: OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(main.signals, "leave_at_once", lambda *_: None)
    monkeypatch.setattr(main.project, "make_importable", lambda layers: None)
    monkeypatch.setattr(sys, "argv", ["ddp-hydra", *words])
    assert main.report(main.compose_and_run) == 1
    assert "cannot write standard output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "is_sentence"),
    [
        ("/lib/site-packages/hydra/_internal/config.py", True),
        (f"{ROOT}/ddp_hydra/config/project.py", True),
        ("/lib/site-packages/theirs/data.py", False),
        ("/home/me/models/mine.py", False),
    ],
)
def test_a_file_that_may_not_be_read_is_a_sentence_but_for_code_of_a_user(file, is_sentence, monkeypatch, capsys):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    code = compile("raise PermissionError(13, 'Permission denied', 'conf/slow.yaml')", file, "exec")
    assert main.report(partial(exec, code, {})) == 1
    said = capsys.readouterr().err
    assert said.startswith("ddp_hydra: conf/slow.yaml: Permission denied: check its rights") == is_sentence, said
    assert ("Traceback" in said) != is_sentence


def test_a_run_that_is_a_link_to_itself_is_told_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    (tmp_path / "loop").symlink_to("loop")
    assert main.report(partial(main.read_words, ["resume=loop"])) == 1
    assert capsys.readouterr().err.startswith("ddp_hydra: loop/.hydra/overrides.yaml: Too many levels of")
