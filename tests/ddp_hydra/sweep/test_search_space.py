"""What a sweep is told to search, and what is refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep import search_space
from ddp_hydra.sweep.launcher import GangLauncher

OPTIONS = {"experiment": ["digits", "tiny"], "b": ["d1"]}
LOADER = SimpleNamespace(get_group_options=lambda group, results_filter=None: OPTIONS.get(group, []))
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
PBT = "ddp_hydra.sweep.pbt.PopulationSweeper"


def check(words: Sequence[str], target: str = BASIC, **options: Any) -> None:
    trials = {"n_trials": 20, "n_jobs": 2} if target == OPTUNA else {}
    sweeper = {"_target_": target, "params": None, **trials, **options}
    overrides = {"task": list(words), "hydra": []}
    search_space.check(OmegaConf.create({"hydra": {"sweeper": sweeper, "overrides": overrides}}), LOADER)


@pytest.mark.parametrize(
    ("target", "word", "said"),
    [
        (BASIC, "a.b=interval(0.01,0.1)", "give a.b=0.01,0.1 or add hydra/sweeper=optuna"),
        (BASIC, "a.b=tag(log,interval(0.01,0.1))", "give a.b=0.01,0.1 or add hydra/sweeper=optuna"),
        (BASIC, "a.b=interval(1,2)", "give a.b=1,2 or add hydra/sweeper=optuna"),
        (BASIC, "a.b=interval(0.123456789,1e-7)", "from a number to a larger one"),
        (BASIC, "a.b=interval(1e-7,0.123456789)", "give a.b=1e-07,0.123456789 or add hydra/sweeper=optuna"),
        (BASIC, "a=interval(2,1)", "from a number to a larger one"),
        (BASIC, "a=range(1,0)", "no value is in this range: .* range(5,0,-1)"),
        (BASIC, "a=range(0,1,0)", "must not be zero"),
        (BASIC, "a=range(0.5,0.1)", "no value is in this range"),
        (BASIC, "experiment=glob(zz*)", "this matches nothing: the options of experiment are digits, tiny"),
        (BASIC, "optimizer.lr=glob(*)", "this matches nothing: optimizer.lr is no group with options"),
        (OPTUNA, "a=interval(0.1,0.01)", "from a number to a larger one"),
        (OPTUNA, "a=tag(log,interval(0,0.01))", "with log from more than 0, as in 'a=tag(log,interval(0.001,0.1))'"),
        (OPTUNA, "a=range(1,0)", "no value is in this range: it goes from a number up to a larger one, range(0,5)$"),
        (OPTUNA, "a=range(5,0,-1)", "no value is in this range"),
        (OPTUNA, "a=shuffle(range(1,1))", "no value is in this range"),
        (OPTUNA, "experiment=glob(*)", "give the names one by one, choice(a,b)"),
        (PBT, "a=interval(2,1)", "from a number to a larger one"),
        (PBT, "a=interval(1,1)", "from a number to a larger one"),
        (PBT, "a=range(1,1)", "no value is in this range"),
        (PBT, "experiment=glob(*)", "give the names one by one, choice(a,b)"),
    ],
)
def test_what_gives_no_job_is_refused_by_the_word_that_was_typed(target, word, said):
    pattern = f"^{re.escape(word)}: .*" + re.escape(said).replace(r"\.\*", ".*").replace(r"\$", "$")
    with pytest.raises(ConfigError, match=pattern):
        check(["b=1", word], target)
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError, match=pattern):
        check(["b=1"], target, params={key: value})
    if target == BASIC and "interval" not in value:
        check(["b=1", word, f"{key}=1"], target)  # the later one counts
    else:  # the sweeper reads both
        with pytest.raises(ConfigError, match=pattern):
            check([f"{key}=1"], target, params={key: value})


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (OPTUNA, {"n_trials": 0}, "hydra.sweeper.n_trials=0: give a whole number of at least 1"),
        (OPTUNA, {"n_jobs": 0}, "hydra.sweeper.n_jobs=0: give a whole number of at least 1"),
        (BASIC, {"max_batch_size": 0}, "hydra.sweeper.max_batch_size=0: give a whole number of at least 1, or null"),
    ],
)
def test_a_sweep_of_no_jobs_is_refused(target, options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(["a=1"], target, **options)


def test_a_grid_takes_no_interval():
    grid = {"sampler": {"_target_": "optuna.samplers.GridSampler", "_partial_": True}}
    for word in ("a=interval(1,2)", "a=int(tag(log,interval(1,8)))"):
        said = rf"^{re.escape(word)}: hydra/sweeper/sampler=grid takes values: give choice"
        with pytest.raises(ConfigError, match=said):
            check([word, "a=3"], OPTUNA, **grid)  # the grid is made of what is fixed, too
        check([word, "a=choice(1,2)"], OPTUNA, **grid)
    check(["a=int(interval(1,5))", "b=range(1,3)", "c=shuffle(range(1,3))"], OPTUNA, **grid)
    for word in ("a=int(interval(1,1))", "a=range(1,1)", "a=range(0,2,5)"):
        with pytest.raises(ConfigError, match=rf"^{re.escape(word)}: .* leaves out the end, so no value is left"):
            check([word], OPTUNA, **grid)


@pytest.mark.slow  # Optuna takes seconds to import
@pytest.mark.filterwarnings("ignore:The distribution is specified by")
def test_what_optuna_makes_a_distribution_of_is_not_refused_and_all_else_is():
    optuna = pytest.importorskip("hydra_plugins.hydra_optuna_sweeper._impl")
    ends = [(0, 1), (1, 1), (1, 0), (1.5, 2), (1.5, 1), (1, 1.5)]
    ranges = [f"range({low},{high}{step})" for low, high in ends for step in ("", ",0.5")]
    intervals = [f"interval({low},{high})" for low, high in ends]
    values = [*ranges, *intervals, *(f"shuffle({one})" for one in ranges), *(f"tag(log,{one})" for one in intervals)]
    words = [f"a={value}" for value in values] + [f"a=int({value})" for value in ranges + intervals]
    for word in words:
        override = OverridesParser.create().parse_override(word)
        try:
            optuna.create_optuna_distribution_from_override(override)
        except ValueError:
            with pytest.raises(ConfigError):
                check([word], OPTUNA)
        else:
            check([word], OPTUNA)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (BASIC, ["a=1,2", "experiment=glob(*)", "b=range(1,3)", "c=range(3,1,-1)", "d=sort(2,1)", "~e", "+f=[1,2]"]),
        (BASIC, []),
        (
            OPTUNA,
            [
                "a=interval(1,1)",
                "d=range(1,1)",
                "e=range(0.5,0.5)",
                "b=tag(log,int(interval(1,9)))",
                "c=range(0,1,0.1)",
                "d=choice(x,y)",
            ],
        ),
        (PBT, ["a=interval(0.1,1)", "b=1,2"]),
        ("mine.Sweeper", ["a=interval(0,1)", "b=glob(d*)"]),
    ],
)
def test_all_else_is_left_to_the_sweeper(target, words):
    check(words, target, **({"max_batch_size": 2} if target == BASIC else {}))


def test_a_launcher_refuses_before_it_makes_a_folder(tmp_path):
    sweeper = {"_target_": BASIC, "params": None, "max_batch_size": None}
    overrides = {"task": ["a=range(1,0)"], "hydra": []}
    hydra = {"sweeper": sweeper, "overrides": overrides, "sweep": {"dir": str(tmp_path / "new")}}
    ours = {"cluster": {"_target_": "x"}, "dispatch": {}, "trainer": {}}
    context = SimpleNamespace(config_loader=LOADER)
    with pytest.raises(ConfigError, match="no value is in this range"):
        GangLauncher().setup(
            hydra_context=context,  # type: ignore[arg-type]
            task_function=None,  # type: ignore[arg-type]
            config=OmegaConf.create({**ours, "hydra": hydra}),
        )
    assert not list(tmp_path.iterdir())
