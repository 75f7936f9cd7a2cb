"""`evaluate` of the last checkpoint gives the numbers of the last validation, with any batch size and any ranks."""

from __future__ import annotations

import pytest

import ddp_hydra
from tests.properties.test_splits import BARE, CASES

pytestmark = pytest.mark.integration


QUICK = ("classification", "trained loss", "segmentation", "language model", "user's of two parts")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
def test_an_evaluation_gives_the_numbers_of_the_last_validation(case, run):
    words = (*BARE, *case.words, f"data.kind={case.kind}", "trainer.epochs=1", "data.batch_size=6", "dispatch.ranks=2")
    trained = run(*words)
    validated = {name: value for name, value in trained.summary["metrics"].items() if name.startswith("val/")}
    assert "val/loss" in validated
    for ranks, size in ((1, 17), (3, 2)):
        found = ddp_hydra.Run(trained.dir).evaluate(f"dispatch.ranks={ranks}", f"data.batch_size={size}", which="last")
        numbers = {name: value for name, value in found.items() if name.startswith("val/")}
        assert numbers == pytest.approx(validated, rel=1e-9, abs=1e-9), (ranks, size)
