"""Jobs on text: packed rows train as documents do, and a mixture goes on where it was, on any number of ranks."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch

from tests.integration.support import training
from tests.support.tiny_llm import write_tokenizer

pytestmark = pytest.mark.integration

LENGTHS = [3, 19, 1, 7, 7, 12, 2, 5, 18, 4, 1, 9]


@pytest.mark.medium
def test_packed_rows_on_two_ranks_train_as_documents_on_one(client2, project, tmp_path):
    """The rows hold unequal numbers of tokens."""
    texts = ["".join(chr(97 + (7 * n + 3 * i) % 26) for i in range(length)) for n, length in enumerate(LENGTHS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    words = (
        "data=text", f"data.files={tmp_path}/rows.jsonl", "data.val=null", f"data.tokenizer={tokenizer}",
        f"data.cache_dir={tmp_path}/cache", "data.sequence_length=30", "model=llama", "task=model_loss",
        "metrics=none", "optimizer.lr=0.5", "optimizer.momentum=0",
        "optimizer.nesterov=false", "scheduler=none", "trainer.max_steps=1",
        "trainer.log_every_steps=1",
    )  # fmt: skip
    rows = ("data.packing=true", "data.batch_size=2", "parallel=fsdp2")
    packed = training.train(client2, project, tmp_path / "packed", *words, *rows)
    alone = training.train(client2, project, tmp_path / "alone", *words, "data.batch_size=12", ranks=1)
    weights = alone.checkpoint("last.pt")["model"]
    for name, one in packed.checkpoint("last.pt")["model"].items():
        torch.testing.assert_close(one, weights[name], rtol=0, atol=1e-6)
    assert packed.metrics()[0]["train/loss"] == pytest.approx(alone.metrics()[0]["train/loss"], rel=1e-6)


def test_a_mixture_has_one_sequence_amid_an_epoch_and_on_other_ranks(client2, project, tmp_path):
    sets = [
        f"+data.sets.{name}.{part}.{key}={value}"
        for name, n in (("many", 40), ("few", 10))
        for part in ("train", "val")
        for key, value in {"_target_": "data.tiny.Points", "n": n, "seed": len(part + name)}.items()
    ]
    words = ("data=mix", *sets, "data.weights={many: 2, few: 1}", "model=tiny", "model.tell=true", "optimizer.lr=0.1",
             "trainer.epochs=2", "trainer.log_every_steps=1", "results.keep_checkpoints=null",
             "trainer.checkpoint_every_steps=4")  # fmt: skip
    whole = training.train(client2, project, tmp_path / "whole", *words, "data.batch_size=6", ranks=2)
    assert len(whole.samples()) == 10  # of 60 samples an epoch: 40 and 20
    first = whole.folder / "checkpoints" / "step-000004.pt"
    rest = training.train(
        client2, project, tmp_path / "rest", *words, "data.batch_size=12", "dispatch.ranks=1", ranks=1, resume=first
    )
    assert list(chain(*rest.samples())) == list(chain(*whole.samples()[4:]))
    ends = [run.metrics()[-1] for run in (whole, rest)]
    assert ends[0].keys() >= {"val/loss", "val/loss/many", "val/accuracy/few"}
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)
