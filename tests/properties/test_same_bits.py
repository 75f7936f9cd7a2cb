"""A run comes to the same bits, whoever reads its data and whatever happens to it: a stop and a resume, a lost rank.

Here all that is random is in it: batch statistics, dropout, an average of the weights, and a data set that draws from
torch's, numpy's and Python's global generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.golden import digest

pytestmark = pytest.mark.integration

WORDS = (
    *("data=drawing", "model=noisy", "optimizer=adamw", "trainer.epochs=2", "trainer.ema_decay=0.9"),
    *("trainer.checkpoint_every_steps=1", "results.keep_checkpoints=null", "objective.metric=val/loss"),
)
STEPS = {1: 20, 2: 10, 3: 6}
"""Steps of two epochs, by the number of ranks."""

events = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([2, 3, 1]),
        "parts": st.sampled_from([1, 2]),
        "stop": st.sampled_from([3, 2, 4, 5]),
        "kill": st.sampled_from([5, None, 4, 6]),
        "workers": st.tuples(st.sampled_from([2, 0, 1]), st.sampled_from([0, 1, 2])),
    }
)


def test_a_run_comes_to_the_same_bits_whatever_happens_to_it(run):
    @settings(
        derandomize=True,
        phases=[Phase.generate],
        max_examples=max(1, settings().max_examples // 40),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(how=events)
    def check(how: Mapping[str, Any]) -> None:
        size = (f"dispatch.ranks={how['ranks']}", f"trainer.gradient_accumulation_steps={how['parts']}")
        size = (*size, f"data.batch_size={4 // how['parts']}")
        one, other = (f"data.workers={number}" for number in how["workers"])
        whole = run(*WORDS, *size, one)
        last_step = STEPS[how["ranks"]]
        stop = min(how["stop"], last_step - 1)
        kill = [] if how["kill"] is None else [f"faults=['kill,rank=0,step={max(how['kill'], stop + 1)}']"]
        again = run(f"resume={whole.dir}/checkpoints/step-{stop:06d}.pt", other, *kill)
        saved = [torch.load(one.dir / "checkpoints" / "last.pt", weights_only=True) for one in (whole, again)]
        assert [content["position"]["step"] for content in saved] == [last_step] * 2
        assert digest(whole.dir / "checkpoints" / "last.pt") == digest(again.dir / "checkpoints" / "last.pt"), how
        assert whole.summary["metrics"]["val/loss"] == again.summary["metrics"]["val/loss"]
        assert whole.summary["metrics"]["train/loss"] == again.summary["metrics"]["train/loss"]

    check()
