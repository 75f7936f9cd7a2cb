"""Projects whose main config and experiments say different things of one key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddp_hydra.cli.compose import compose
from ddp_hydra.errors import ConfigError

pytestmark = [pytest.mark.medium, pytest.mark.filterwarnings("ignore:.*missing `_self_`")]

EXPERIMENT = """\
# @package _global_
defaults:
  - base
  - override /transform@data.train.transform: train
  - override /callbacks: [one, two]
trainer: {precision: bf16, max_steps: 1000}
objective: {direction: maximize, metric: val/mine}
optimizer: {lr: 0.01}
"""
BASE = """\
# @package _global_
defaults:
  - override /optimizer: adamw
trainer: {epochs: 7}
model: {width: 5}
"""
FILES = {
    "experiment/mine": EXPERIMENT,
    "experiment/base": BASE,
    "experiment/plain": "# @package _global_\noptimizer: {lr: 0.01}\n",
    "experiment/secret": "# @package _global_\nresults: {wandb: {api_key: BBB}}\n",
    "experiment/short": "# @package _global_\ndefaults: [base, {/len: short}, _self_]\n",
    "experiment/bare": "# @package _global_\ndefaults: [base, {/len@trainer: bare}, _self_]\n",
    "experiment/prod": "# @package _global_\ndefaults: [base, {/env@_global_: plain}, _self_]\n",
    "len/short": "# @package trainer\nepochs: 9\n",
    "len/bare": "epochs: 9\n",
    "env/numbers": "epochs: 9\n",
    "env/plain": "trainer: {epochs: 9}\n",
    "len/other": "trainer: {epochs: 8}\n",
    "env/nested": "# @package _global_\ndefaults: [{/len@trainer: bare}]\n",
    "env/prod": "# @package _global_\ndefaults: [{override /optimizer: sgd}]\ntrainer: {epochs: 9}\n",
    "callbacks/one": "one: {_target_: models.mine.Callback}",
    "callbacks/two": "two: {_target_: models.mine.Callback}",
    "transform/train": "_target_: models.mine.Transform",
    "transform/eval": "_target_: models.mine.Transform",
    "data/photos": "defaults:\n  - /transform@train.transform: eval\n  - _self_\nbatch_size: 2\n",
    "model/wide": "_target_: models.mine.Wide\nwidth: 3\n",
}


@pytest.fixture
def composed(tmp_path, monkeypatch):
    """Compose the words in a project with a main config of these lines."""
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def compose_in(main: str, *words: str):
        for name, text in {**FILES, "config": main}.items():
            path = tmp_path / "conf" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return compose(["data=photos", "model=wide", *words])

    return compose_in


def main(*entries: str, values: str = "") -> str:
    """A main config with these entries of its defaults list, and values of its own."""
    return "".join(["defaults:\n", *(f"  - {entry}\n" for entry in entries), values])


RIGHT = ("job", "_self_", "experiment: null", "debug: null")
AFTER = ("job", "experiment: null")
OWN = "optimizer: {lr: 0.5}\n"


def test_an_experiment_wins_over_values_that_the_main_config_sets_before_it(composed):
    config = main(*RIGHT, values=OWN + "trainer: {epochs: 1}\n")
    cfg = composed(config, "experiment=mine", "optimizer.weight_decay=3")
    assert (cfg.optimizer.lr, cfg.trainer.epochs, cfg.model.width, cfg.trainer.max_steps) == (0.01, 7, 5, 1000)
    assert list(cfg.callbacks) == ["one", "two"]
    assert composed(config, "experiment=mine", "debug=one_batch").trainer.max_steps == 1


@pytest.mark.parametrize(
    ("config", "experiment", "said"),
    [
        (main(*AFTER, values=OWN), "mine", r"experiment=mine sets optimizer\.lr=0\.01, and 0\.5 of"),
        (main(*AFTER, "_self_", values="model: {width: 9}"), "mine", r"sets model\.width=5, and 9 of"),
        (main(*AFTER, values="trainer: {precision: fp32}"), "mine", r"sets trainer\.precision=bf16, and fp32 of"),
        (
            main(*AFTER, values="results: {wandb: {api_key: CCC}}"),
            "secret",
            r"sets results\.wandb\.api_key=\*\*\*, and \*\*\* of .* or type results\.wandb\.api_key=\*\*\*, too",
        ),
        (main("_self_", "experiment: null", "job"), "plain", r"optimizer\.lr=0\.01, and 0\.05 of"),
        (
            main(*RIGHT, "override transform@data.train.transform: eval"),
            "mine",
            r"transform@data\.train\.transform=train",
        ),
        (
            main(*RIGHT, "override callbacks: [one]"),
            "mine",
            r"callbacks=\[one,two\], and `override callbacks: \[one\]`",
        ),
        (main(*RIGHT, "override callbacks: []"), "mine", r"chooses callbacks=\[one,two\]"),
        (main(*RIGHT, "override optimizer: sgd"), "mine", "chooses optimizer=adamw"),  # by what it is based on
    ],
)
def test_a_main_config_that_wins_over_an_experiment_is_refused(composed, config, experiment, said):
    with pytest.raises(ConfigError, match=said):
        composed(config, f"experiment={experiment}")


@pytest.mark.parametrize(
    "entry", ["experiment: [base, plain]", "experiment/plain", "/experiment/plain", "experiment@_global_: plain"]
)
def test_an_experiment_that_the_main_config_names_otherwise_is_judged_alike(composed, entry):
    with pytest.raises(ConfigError, match=r"experiment=plain sets optimizer\.lr=0\.01, and 0\.5 of"):
        composed(main("job", entry, values=OWN))
    assert composed(main("job", "_self_", entry, values=OWN)).optimizer.lr == 0.01


def test_what_is_typed_wins_and_what_is_alike_is_taken(composed):
    assert composed(main(*AFTER, values=OWN), "experiment=mine", "optimizer.lr=3").optimizer.lr == 3
    assert composed(main(*AFTER, values=OWN)).optimizer.lr == 0.5
    alike = main(*AFTER, values="trainer: {precision: bf16, max_steps: 1000}\nobjective: {direction: maximize}\n")
    assert composed(alike, "experiment=mine", "~optimizer.lr").trainer.max_steps == 1000
    one = main(*RIGHT, "override callbacks: [one]")
    assert list(composed(one, "experiment=mine", "callbacks=[two]").callbacks) == ["two"]


@pytest.mark.parametrize(("config", "words"), [(main(*RIGHT, "env: prod"), []), (main(*RIGHT), ["+env=prod"])])
def test_a_group_of_ones_own_that_comes_later_wins_over_an_experiment(composed, config, words):
    cfg = composed(config, "experiment=mine", *words)
    assert (cfg.trainer.epochs, cfg.model.width, cfg.optimizer._target_) == (9, 5, "torch.optim.SGD")
    last = config.replace("  - _self_\n", "") + "  - _self_\ntrainer: {precision: fp32}\n"
    with pytest.raises(ConfigError, match=r"experiment=mine sets trainer\.precision=bf16"):
        composed(last, "experiment=mine", *words)


ANY_PACKAGE = (
    ["experiment=mine", "+len=short"],
    ["experiment=mine", "+len@trainer=bare"],
    ["experiment=mine", "+env@_global_.trainer=numbers"],
    ["experiment=mine", "+env@_global_=plain"],
    ["experiment=mine", "+env=nested"],
    ["experiment=[mine,short]"],
    *([f"experiment={name}"] for name in ("short", "bare", "prod")),
)


@pytest.mark.parametrize("config", [main(*RIGHT), main(*RIGHT, "len@_global_: other")], ids=["last", "not last"])
@pytest.mark.parametrize("words", ANY_PACKAGE, ids=" ".join)
def test_what_is_chosen_for_a_package_wins_where_it_comes_later(composed, config, words):
    is_typed = any("+" in word for word in words)
    assert composed(config, *words).trainer.epochs == (9 if is_typed or "len" not in config else 8)


def test_what_a_list_of_experiments_loses_is_told_and_what_an_added_place_may_set_is_not_judged(composed, tmp_path):
    with pytest.raises(ConfigError, match=r"experiment=plain sets optimizer\.lr=0\.01, and 0\.5 of"):
        composed(main(*AFTER, values=OWN), "experiment=[base,plain]")
    (tmp_path / "more/there").mkdir(parents=True)
    (tmp_path / "more/there/prod.yaml").write_text("# @package _global_\noptimizer: {lr: 3}\n")
    place = f"hydra: {{searchpath: ['file://{tmp_path}/more']}}\n"
    assert composed(main(*AFTER, values=OWN + place), "experiment=plain", "+there=prod").optimizer.lr == 3


def test_what_cfg_job_shows_is_what_runs_or_is_refused_alike(composed, tmp_path):
    with pytest.raises(ConfigError, match="wins over it") as caught:
        composed(main(*AFTER, values=OWN), "experiment=mine")
    words = ["data=photos", "model=wide", "experiment=mine", "--cfg", "job"]
    ended = subprocess.run([sys.executable, "-m", "ddp_hydra", *words], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, f"ddp_hydra: {caught.value}\n" in ended.stderr, ended.stdout) == (1, True, "")
