"""Packed documents give the logits, losses and gradients of each document alone, and weigh as much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError
from ddp_hydra.finetune.text import packed
from ddp_hydra.tasks import ModelLoss
from tests.support.tiny_llm import llama

pytestmark = pytest.mark.medium

CPU = torch.device("cpu")
LENGTHS = [3, 19, 1, 7, 7, 12, 2, 5, 18, 4, 1, 9]
ROWS = [{"text": "".join(chr(97 + (7 * n + 3 * i) % 26) for i in range(length))} for n, length in enumerate(LENGTHS)]


def gpt2(attention: str) -> Any:
    """Return a model with learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 265}
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **ends, **dropout, attn_implementation=attention, initializer_range=0.3)
    return GPT2LMHeadModel(config)


@pytest.fixture
def both(make):
    """The documents in rows, and alone."""
    return (make(ROWS, sequence_length=24, packing=packing) for packing in (True, False))


@pytest.mark.parametrize("model", [llama, gpt2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_loss_and_gradient_are_the_ones_of_each_document_alone(both, model, attention):
    """The eager attention of Llama has a softmax in float32."""
    packed_set, alone = both
    near = {"rtol": 0, "atol": 2e-6 if (model, attention) == (llama, "eager") else 1e-9}
    network = model(attention).double().train()
    packed_set.check_model(network)
    assert network.training
    (batch,) = Loader(packed_set, CPU).load([list(range(len(packed_set)))])
    assert len(batch["input_ids"]) == 5 < len(alone)
    logits = network(**{name: part for name, part in batch.items() if name != "labels"}).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    total = 0.0
    for row, documents in enumerate(packed_set.rows):
        begin = 0
        for document in documents.tolist():
            ids = alone[document]["input_ids"][None]
            own = network(input_ids=ids).logits
            torch.testing.assert_close(logits[row : row + 1, begin : begin + ids.shape[1]], own, **near)
            total = total + F.cross_entropy(own[0, :-1], ids[0, 1:], reduction="sum") / sum(LENGTHS)
            begin += ids.shape[1]
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=0)
    for one, parameter in zip(gradients, network.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, **near)


def test_they_weigh_as_much_also_where_the_rows_of_a_batch_are_one(make, both):
    flat, steps = make(ROWS, sequence_length=24, packing=True, flatten=True), []
    flat.check_model(llama())
    for data in (*both, flat):
        (batch,) = Loader(data, CPU).load([list(range(len(data)))])
        steps.append(ModelLoss().step(llama(), batch))
    assert batch["input_ids"].shape == (1, 5 * 24)
    for step in steps:
        assert step.n == sum(LENGTHS)  # with eos, and without the first token of each
        torch.testing.assert_close(step.loss, steps[0].loss, rtol=1e-6, atol=0)


def test_answers_stay_the_only_ones_that_count(make, shown):
    rows = [{"prompt": "q" * n, "completion": "a" * n} for n in range(1, 6)]
    data = make(rows, packing=True, sequence_length=14)
    assert [text for _, text in shown(data)] == ["aaaaa</s>a</s>", "aaaa</s>aa</s>", "aaa</s>"]
    assert data.described() == "prompt + completion -> 5 documents in 3 rows of 14 tokens, 83% full"


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_each_document_is_in_one_row_that_it_fits_into(lengths):
    sizes = np.asarray(lengths)
    rows = packed(sizes, 20)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    filled = sorted(sizes[row].sum() for row in rows)
    assert filled[-1] <= 20
    assert len(rows) < 2 or filled[0] + filled[1] > 20  # no two rows would fit into one


class IgnoresUseCache(torch.nn.Module):
    """Calls a model of transformers as one does who does not know of packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = llama()

    def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
        return self.inside(input_ids=input_ids, position_ids=position_ids)


class NoPositions(torch.nn.Linear):
    def forward(self, input_ids: Any) -> Any:
        return input_ids


def test_a_model_that_does_not_keep_documents_apart_is_refused(make):
    from transformers import BertConfig, BertForMaskedLM

    data = make(ROWS, sequence_length=24, packing=True)
    with pytest.raises(ConfigError, match=r"IgnoresUseCache does not keep documents of one row apart by their posit"):
        data.check_model(IgnoresUseCache())
    with pytest.raises(ConfigError, match=r"NoPositions does not keep .* unexpected keyword argument 'position_ids'"):
        data.check_model(NoPositions(1, 1))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ConfigError, match=r"BertForMaskedLM with the attention sdpa does not keep documents"):
        data.check_model(BertForMaskedLM(BertConfig(vocab_size=265, **sizes)))
