"""Projects whose files have keys of their own at the top of the config, or mistakes."""

from __future__ import annotations

import logging
import sys

import pytest
from omegaconf import OmegaConf

from ddp_hydra.cli.compose import compose
from ddp_hydra.config import checkpoint_config, schema, unknown_keys
from ddp_hydra.errors import ConfigError

pytestmark = pytest.mark.medium

MAIN = "defaults: [job, _self_, experiment: null]\n"
GLOBAL = "# @package _global_\n"
OWN = "paths: {deep: /photos/deep}\nmine: {a: 1}\nhydra: {run: {dir: '${paths.deep}'}}\n"
PATHS = "root: /photos\ndeep: ${paths.root}/deep\nout: ${hydra:runtime.output_dir}\nother: ${oc.env:NO_SUCH}\n"


@pytest.fixture
def composed(tmp_path, monkeypatch):
    """Compose the words in a project with these files of conf/."""
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def compose_in(files: dict[str, str], *words: str):
        for name, text in {"config": MAIN, "paths/default": PATHS, **files}.items():
            path = tmp_path / "conf" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        cfg = compose(["data.bucket=b", "cluster=inline", *words])
        return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])

    return compose_in


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["+paths=default"]),
        ({"experiment/mine": f"{GLOBAL}defaults: [/paths: default]\n"}, ["experiment=mine"]),
        ({"config": "defaults: [job, paths: default, _self_]\n"}, []),
        ({"config": f"{MAIN}{OWN}"}, []),
    ],
)
def test_a_node_of_ones_own_at_the_top_is_taken_from_files(composed, files, words):
    cfg = composed(files, *words, "data.bucket=${paths.deep}")
    unknown_keys.check(cfg)
    assert schema.resolved(cfg)["data"]["bucket"] == "/photos/deep"
    stored = checkpoint_config.stored_config(cfg)
    assert checkpoint_config.composed(stored).data.bucket == "/photos/deep"
    assert checkpoint_config.composed(stored, ["paths.deep=/there"]).data.bucket == "/there"


def test_only_what_refers_to_a_node_of_ones_own_needs_its_value(composed):
    cfg = composed({}, "+paths=default", "data.bucket=${paths.other}")
    with pytest.raises(ConfigError, match=r"^data\.train\.bucket=.*: Environment variable 'NO_SUCH' not found"):
        schema.resolved(cfg)


TRAINER = "there is no such key: did you mean trainer.epochs? The keys of trainer are"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("trainer: {epochz: 3}", f"experiment/mine.yaml: trainer.epochz: {TRAINER}"),
        ("trainer: {epochs: three}", "experiment/mine.yaml: trainer.epochs: Value 'three' of type 'str' could not be "),
        ("trainer: {epochs: three}", ": give a whole number of at least 1, or null"),
        ("trainer: [3]", "experiment/mine.yaml: Merge error: list is not a subclass of TrainerConfig"),
        (
            "hydra: {job: {env_st: {A: 1}}}",
            "experiment/mine.yaml: hydra.job.env_st: there is no such key: did you mean ",
        ),
        ("optimiser: {lr: 3}", "experiment/mine.yaml: optimiser: there is no such key: did you mean optimizer?"),
        ("trainers: {epochs: 3}", "experiment/mine.yaml: trainers: there is no such key: did you mean trainer?"),
        *(
            (f"{name}: {{lr: 3}}", f"experiment/mine.yaml: {name}: there is no such key: did you mean {key}?")
            for name, key in (("trainerr", "trainer"), ("schedulerr", "scheduler"), ("model_", "model"))
        ),
        ("epochs: 3", "experiment/mine.yaml: epochs: there is no such key: did you mean trainer.epochs?"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_the_file(composed, content, said):
    with pytest.raises(ConfigError) as caught:
        composed({"experiment/mine": f"{GLOBAL}{content}\n"}, "experiment=mine")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_nothing_reads_without_its_package_is_told(composed, caplog):
    said = "trainer: nothing reads it: a file that sets keys of other groups needs the line `# @package _global_`"
    with pytest.raises(ConfigError, match=f"^experiment/mine.yaml: experiment.{said}"):
        composed({"experiment/mine": "trainer: {epochs: 3}\n"}, "experiment=mine")
    with caplog.at_level(logging.WARNING):
        composed({"env/prod": "trainer: {epochs: 3}\n"}, "+env=prod")
    assert caplog.messages == [f"env.{said} at its top"]


def test_a_known_key_may_be_meant(composed):
    with pytest.raises(
        ConfigError, match=r"^sede: there is no such key: did you mean seed\? The keys are cluster, data"
    ):
        composed({}, "+sede=3")


@pytest.mark.parametrize("word", ["+mine=3", "+mine.a=3"])
def test_a_new_key_that_is_typed_has_to_be_read(composed, word):
    with pytest.raises(ConfigError, match=r"^mine: there is no such key; the keys are cluster, data"):
        composed({}, word)
    unknown_keys.check(composed({}, word, f"data.bucket=${{{word[1:-2]}}}"))


def test_names_that_are_no_misspellings_are_taken(composed, caplog):
    names = ("user", "logs", "dataset", "date", "mode", "module", "samples", "train")
    own = "".join(f"{name}: {{a: 1}}\n" for name in names).replace("train: {a: 1}", "train: true")
    with caplog.at_level(logging.WARNING):
        cfg = composed({"config": f"{MAIN}{own}root: /x\ndevice: cpu\nprecision: 16\n"})
    unknown_keys.check(cfg)
    others = (("root", "results.root"), ("device", "trainer.device"), ("precision", "trainer.precision"))
    assert caplog.messages == [f"{name}: nothing reads it: did you mean {key}?" for name, key in others]


def test_a_node_that_only_hydra_reads_is_taken(composed):
    unknown_keys.check(
        composed({"config": f"{MAIN}optimiser: {{dir: /x}}\nhydra: {{run: {{dir: '${{optimiser.dir}}'}}}}\n"})
    )


def test_what_is_typed_adds_to_a_node_of_a_file(composed, caplog):
    with caplog.at_level(logging.WARNING):
        assert composed({}, "+paths=default", "+paths.more=2").paths.more == 2
    assert caplog.messages == ["paths.more: nothing reads it"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("defaults: [override /model: resnet18]", "`override /model` finds nothing in experiment"),
        ("# later", "experiment: nothing reads it"),
    ],
)
def test_an_experiment_without_its_package_is_told(composed, content, said):
    with pytest.raises(ConfigError, match=f"^experiment/mine.yaml: {said}: a file that sets keys of"):
        composed({"experiment/mine": f"{content}\n"}, "experiment=mine")


def test_a_main_config_of_ones_own_may_lack_groups(composed):
    assert composed({"config": "defaults: [cluster: inline, _self_]\ndata: {bucket: a}\nparts: 1\n"}).parts == 1
    assert "objective" not in composed({}, "~objective")


def test_a_variable_is_a_text_also_where_all_are_given_at_once(composed):
    with pytest.raises(ConfigError, match=r"^hydra\.job\.env_set\.A is no text: give a text, in quotes$"):
        composed({}, "+hydra.job.env_set={A: [1]}")


@pytest.mark.parametrize("words", [["+env=copies"], ["hydra.job.env_copy=[NO_SUCH]"]])
def test_a_variable_that_cannot_be_copied_is_named(composed, words):
    said = "^hydra.job.env_copy: NO_SUCH is not set: type NO_SUCH=<value> in front of the command, or leave it out of"
    with pytest.raises(ConfigError, match=said):
        composed({"env/copies": f"{GLOBAL}hydra: {{job: {{env_copy: [NO_SUCH]}}}}\n"}, *words)
