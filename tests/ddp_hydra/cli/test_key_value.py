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


@pytest.mark.parametrize("text", ["1.10", "on", "12:30", "007", "1e3", "a: b: c", "[x", "a=b", "2026-11-01"])
def test_a_text_is_taken_as_it_was_typed(text):
    options, others = parse(Options, [f"run={text}", "n=0x10", "yes=on", "out=null", "model.lr=1"], "usage")
    assert (options, others) == (Options(run=text, out=None, n=16, yes=True), ["model.lr=1"])
    assert parse(Options, ["run=first", f"run={text}", "out=null", "out=there"], "usage")[0] == Options(text, "there")


@pytest.mark.parametrize(
    "words", [[], ["run=null"], ["run="], ["run=a", "n=many"], ["run=a", "out"], ["run=a", "no=1"]]
)
def test_what_is_missing_or_none_of_them_is_told_with_the_usage(words):
    with pytest.raises(ConfigError, match=r"; usage:\nusage$"):
        parse(Options, words, "usage")
