"""A trained model makes up names, from its run directory."""

from __future__ import annotations

import json
import random
import re

import pytest

from ddp_hydra.cli import export as commands
from ddp_hydra.errors import DdpHydraError

pytestmark = pytest.mark.integration

SYLLABLES = ("ba", "bo", "da", "do", "ka", "ki", "lu", "ma", "mi", "na", "no", "ra", "ri", "sa", "ta", "to")


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Invented names with a pattern that is soon learned."""
    chance = random.Random(0)
    return ["".join(chance.choices(SYLLABLES, k=chance.choice((2, 3)))) for _ in range(400)]


@pytest.fixture(scope="module")
def run(module_cli, names):
    source = module_cli.folder / "names.json"
    source.write_text(json.dumps(names))
    module_cli.done(
        "experiment=pet_names",
        f"data.source={source}",
        "cluster=inline",
        "data.batch_size=256",
        "model.num_layers=1",
        "model.hidden_size=32",
        "optimizer.lr=0.02",
        "trainer.epochs=4",
        "hydra.run.dir=run",
    )
    return module_cli.folder / "run"


def test_it_prints_as_many_new_names_as_asked_for_and_the_same_with_the_same_seed(
    module_cli, project_here, run, names, capsys
):
    def generate(*arguments):
        commands.generate([f"run={run}", *arguments])
        return capsys.readouterr().out.splitlines()

    first = module_cli.done("generate", f"run={run}", "n=12", "seed=5").stdout.splitlines()
    assert len(first) == len(set(first)) == 12
    assert not set(first) & set(names)
    assert all(name and set(name) <= set("abcdefghijklmnopqrstuvwxyz-. ") for name in first)
    assert generate("n=12", "seed=5") == first
    assert generate("n=12", "seed=6") != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["n=5"], "run=<run directory, its URL, or checkpoint> is missing"),
        (["run=no-such-run"], "no-such-run does not exist"),
        (["run={run}", "n=0"], "give n >= 1"),
        (["run={run}", "colour=red"], "the keys are run, n, temperature, seed, which"),
        (["run={run}", "data.no_such_key=1"], "no_such_key"),
    ],
)
def test_what_it_cannot_do_is_said_in_a_sentence(project_here, run, arguments, said):
    with pytest.raises(DdpHydraError, match=re.escape(said)):
        commands.generate([argument.format(run=run) for argument in arguments])
