"""The options of the small commands."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from omegaconf import MISSING

from ddp_hydra.cli.commands import parse
from ddp_hydra.errors import ConfigError


@dataclass
class Options:
    """Some of each kind."""

    run: str = MISSING
    out: str | None = "here"
    n: int = 50
    yes: bool = False


@pytest.mark.parametrize("text", ["1.10", "on", "a: b: c", "[x", "a=b"])
def test_a_text_is_taken_as_it_was_typed(text):
    options, others = parse(Options, [f"run={text}", "n=0x10", "yes=on", "out=null", "model.lr=1"], "usage")
    assert (options, others) == (Options(run=text, out=None, n=16, yes=True), ["model.lr=1"])
    assert parse(Options, ["run=first", f"run={text}", "out=null", "out=there"], "usage")[0] == Options(text, "there")


USAGE = "ddp-hydra show run=<run directory> [n=50] [yes=true]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], r"^run=<run directory> is missing; type ddp-hydra show --help$"),
        (["run="], r"^run=<run directory> is missing"),
        (["runs=a"], r"is missing: did you mean run\? Type ddp-hydra show --help"),
        (["run=a", "n=many"], r"^n=many: give a whole number"),
        (
            ["--config-dir", "ext"],
            r"^--config-dir: leave it out: .*training, and a command.*the run's own",
        ),
        (
            ["run=a", "--cfg=job"],
            r"^--cfg=job: leave it out: .*; the keys are run, out, n, yes; type ddp",
        ),
        (["run=a", "yes=2x"], r"^yes=2x: give true or false"),
        (["run=a", "out"], r"^'out' is not key=value: the keys are run, out, n, yes"),
        (
            ["run=a", "ouut=1"],
            r"^ouut=1: there is no such key: did you mean out\? The keys are run, out, n",
        ),
    ],
)
def test_what_is_missing_or_none_of_them_is_told_with_what_there_is(words, said):
    with pytest.raises(ConfigError, match=said):
        parse(Options, words, USAGE, ["model"])


def test_an_example_is_shown_whole():
    with pytest.raises(ConfigError, match=r"^run='Once upon' is missing; type"):
        parse(Options, ["run="], "ddp-hydra show run='Once upon' [n=50]")


def test_a_key_that_is_left_out_is_the_runs():
    assert parse(Options, ["run=a", "~model.x"], USAGE, ["model"])[1] == ["~model.x"]
    assert parse(Options, ["run=a", "~model.x"], USAGE)[1] == ["~model.x"]
    with pytest.raises(ConfigError, match=r"^~model: there is no such key"):
        parse(Options, ["run=a", "~model"], USAGE)
