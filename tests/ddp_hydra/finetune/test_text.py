"""Text becomes tokens: from any source, once, with what is cut off or left out said; mistakes are told."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForSequenceClassification

from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.finetune.encoder import Encoder
from ddp_hydra.finetune.text import TokenizedText, load_tokenizer
from tests.support.tiny_llm import llama, write_tokenizer

pytestmark = pytest.mark.medium

CPU = torch.device("cpu")
TEXTS = ["abc", "", " \n", "defgh", None, "i" * 30]


def test_documents_end_with_eos_and_are_padded_to_the_longest_of_a_batch(make, shown):
    data = make([{"text": text} for text in TEXTS], sequence_length=10)
    assert shown(data) == [(f"{text}</s>", f"{text}</s>") for text in ("abc", "defgh")] + [("i" * 10, "i" * 10)]
    assert data.described() == "text -> 3 documents; 1 cut off at 10 tokens; 3 empty, left out"
    (batch,) = Loader(data, CPU).load([[0, 1]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch["labels"][0, 4:].tolist() == [-100, -100]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("overflow", "lengths", "told"),
    [
        ("truncate", [4, 6, 10], "1 cut off at 10 tokens"),
        ("split", [4, 6, 10, 10, 10], "1 split at 10 tokens"),
        ("drop", [4, 6], "1 longer than 10 tokens, left out"),
    ],
)
def test_longer_documents(make, overflow, lengths, told):
    """The split one has a token that is left over, which nothing predicts."""
    data = make([{"text": text} for text in TEXTS], sequence_length=10, overflow=overflow)
    assert [len(data[index]["input_ids"]) for index in range(len(data))] == lengths
    assert told in data.described()


def test_sources(make, shown, tokenizer, tmp_path):
    rows = {"text": ["abc", "de"], "other": [1, 2]}
    wanted = [("abc</s>", "abc</s>"), ("de</s>", "de</s>")]
    import datasets

    table = datasets.Dataset.from_dict(rows)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "held": table.select([1])}).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "rows.txt").write_text("abc\nde\n")
    given = {"tokenizer": tokenizer, "cache_dir": str(tmp_path / "cache")}
    assert shown(TokenizedText("parquet", files=[str(tmp_path / "*.parquet")], **given)) == wanted
    assert shown(TokenizedText("text", files=str(tmp_path / "rows.txt"), **given)) == wanted
    assert shown(TokenizedText(str(tmp_path / "one"), **given)) == wanted
    given["tokenizer"] = Path(tokenizer)
    assert shown(TokenizedText(tmp_path / "one", **given)) == wanted
    assert shown(TokenizedText("text", files=[tmp_path / "rows.txt"], **given)) == wanted
    assert shown(TokenizedText(str(tmp_path / "several"), split="held", **given)) == wanted[1:]
    whole = TokenizedText("text", files=str(tmp_path / "rows.txt"), sample_by="document", **given)
    assert shown(whole) == [("abc\nde\n</s>", "abc\nde\n</s>")]
    with pytest.raises(ValueError, match=r"several has no split validation, only train, held: give data\.train_split"):
        TokenizedText(str(tmp_path / "several"), split="validation", **given)
    with pytest.raises(ValueError, match=r"one has no splits: give the validation a folder of its own"):
        TokenizedText(str(tmp_path / "one"), split="validation", **given)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nno json')
    with pytest.raises(ValueError, match=r"bad\.jsonl can't be read as json: "):
        TokenizedText("json", files=str(tmp_path / "bad.jsonl"), **given)
    (tmp_path / "mixed.jsonl").write_text('{"text": 5}\n{"text": "a"}\n{"text": null}\n')
    with pytest.raises(ConfigError, match=r"the column text holds values of several kinds: write text in each row"):
        TokenizedText("json", files=str(tmp_path / "mixed.jsonl"), **given)


def test_tokens_are_made_once_and_anew_for_other_settings(make, shown, monkeypatch, tmp_path):
    rows = [{"text": text} for text in TEXTS]
    first = shown(make(rows, sequence_length=10))
    copied = pickle.loads(pickle.dumps(make(rows, sequence_length=10)))  # as for workers
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "_documents", lambda *_: pytest.fail("made again"))
        assert shown(make(rows, sequence_length=10)) == shown(copied) == first
    assert shown(make(rows, sequence_length=10, eos=False)) == [(text.removesuffix("</s>"),) * 2 for text, _ in first]
    other = write_tokenizer(tmp_path / "other", pad_token="<unk>")
    assert make(rows, sequence_length=10, tokenizer=other).pad_id == 1


def test_classes_of_texts(make):
    data = make([{"text": text, "stars": stars} for text, stars in (("abc", 2), ("", 1), ("de", 0))], label="stars")
    batch = data.collate([data[0], data[1]])
    assert (batch["labels"].tolist(), data.num_classes) == ([2, 0], 3)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]  # no eos
    with pytest.raises(DataError, match="the column stars has 1 empty cell: leave these rows out"):
        make([{"text": "abc", "stars": 2}, {"text": "d", "stars": None}], label="stars")


@pytest.mark.parametrize("options", [{"label": "is_long"}, {"mask": 1e-9}], ids=str)
def test_a_text_that_is_cut_off_keeps_the_tokens_that_close_it(make, tokenizer, tmp_path, options):
    words: Any = load_tokenizer(tokenizer)
    special = [("<s>", words.bos_token_id), ("</s>", words.eos_token_id)]
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    words.save_pretrained(tmp_path / "closing")
    rows = [{"text": text, "is_long": len(text) > 3} for text in ("abcdefghij", "abc")]
    data = make(rows, tokenizer=str(tmp_path / "closing"), sequence_length=6, **options)
    wanted = words([row["text"] for row in rows], truncation=True, max_length=6)["input_ids"]
    assert [data[index]["input_ids"].tolist() for index in range(2)] == wanted
    assert "1 cut off at 6 tokens" in data.described()
    if "label" in options:
        assert (data[0]["labels"].tolist(), data[1]["labels"].dtype, data.num_classes) == (1, torch.int64, 2)


def test_a_masked_language_model_predicts_some_tokens_by_the_draws_of_the_position(make):
    data = make([{"text": "abcdefghij" * 30}] * 4, mask=0.3)
    (one,) = Loader(data, CPU, seed=1).load([[0, 1, 2, 3]])
    (same,), (other,) = Loader(data, CPU, seed=1).load([[3]]), Loader(data, CPU, seed=2).load([[3]])
    assert torch.equal(one["input_ids"][3:], same["input_ids"])
    assert not torch.equal(same["input_ids"], other["input_ids"])
    chosen = one["labels"] != -100
    assert 0.25 < chosen.float().mean() < 0.35
    assert 0.75 < (one["input_ids"] == 4)[chosen].float().mean() < 0.9
    plain = make([{"text": "abcdefghij" * 30}] * 4, eos=False)
    whole = plain.collate([plain[index] for index in range(4)])["input_ids"]
    assert torch.equal(one["input_ids"].where(~chosen, 0), whole.where(~chosen, 0))
    assert torch.equal(one["labels"][chosen], whole[chosen])


MISTAKES = [
    ({"columns": "txt"}, r"there is no column txt, only text, n, talk, ids: give data\.columns="),
    ({"columns": "n"}, r"the column n holds Value\('int64'\), not text: give data\.columns="),
    ({"columns": "ids"}, r"the column ids holds List\(Value\('int64'\)\), not text: give data\.columns="),
    ({"label": "stars"}, r"there is no column stars, only text, n, talk, ids: give data\.label="),
    ({"label": "text"}, r"the column text holds text: write the numbers of the classes"),
    ({"overflow": "cut"}, r"data\.overflow=cut: give one of truncate, split, drop"),
    ({"flatten": True}, r"data\.flatten=true is of packed rows: give data\.packing=true, too"),
    ({"sequence_length": 1}, r"data\.sequence_length=1: give 2 or more"),
    (
        {"mask": 0.1, "columns": ["text", "text"]},
        r"data\.mask=0\.1 is of texts in one column, and the columns are text, ",
    ),
    (
        {"label": "n", "columns": ["text", "text"]},
        r"data\.label=n is of texts in one column, and the columns are text, ",
    ),
    (
        {"columns": ["talk", "talk"]},
        "the columns talk and talk hold lists of messages: join each two to one list, in a",
    ),
    ({"mask": 15}, r"data\.mask=15 is a share of the tokens: give data\.mask=0\.15"),
    ({"mask": 0.1, "packing": True}, r"data\.mask=0\.1 does not go with packed documents: give data\.packing=false"),
    ({"label": "n", "overflow": "split"}, r"data\.label=n is of whole texts: leave data\.overflow=split out"),
    ({"tokenizer": "no/such/folder"}, r"data\.tokenizer=no/such/folder: no/such/folder is no folder on host "),
    ({"chat_template": "no.jinja"}, r"data\.chat_template=no\.jinja is no file: give one, or the template itself"),
]


@pytest.mark.parametrize(("options", "told"), MISTAKES, ids=[str(options) for options, _ in MISTAKES])
def test_mistakes(make, options, told, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=told):
        make([{"text": "abc", "n": 1, "talk": [{"role": "user", "content": "a"}], "ids": [3, 4]}], **options)


@pytest.mark.parametrize(("kind", "options"), [("ClassLabel", {"names": ["a", "b"]}), ("Image", {}), ("Audio", {})])
def test_what_is_no_text_and_no_list_of_messages_is_no_chat(tokenizer, tmp_path, kind, options):
    import datasets

    features = datasets.Features(x=getattr(datasets, kind)(**options))
    datasets.Dataset.from_dict({"x": [None]}, features=features).save_to_disk(tmp_path / "rows")
    with pytest.raises(ConfigError, match=f"the column x holds {kind}.*, not text"):
        TokenizedText(tokenizer=tokenizer, path=str(tmp_path / "rows"), columns=["x"])


@pytest.mark.parametrize(
    ("lacks", "options", "told"),
    [
        ("eos_token", {}, r"has no eos_token, which ends documents: save it with one, or give data\.eos=false"),
        ("pad_token", {"label": "n"}, r"has no pad_token, by which a classifier knows the end of a text"),
        ("mask_token", {"mask": 0.1}, r"has no mask_token: give data\.mask=0, or the tokenizer of a masked"),
    ],
)
def test_a_tokenizer_without_a_token_that_is_needed(make, tmp_path, lacks, options, told):
    rows, bare = [{"text": "abc", "n": 1}], write_tokenizer(tmp_path / "bare", **{lacks: None})
    with pytest.raises(ConfigError, match=told):
        make(rows, tokenizer=bare, **options)
    if lacks == "pad_token":
        assert make(rows, tokenizer=bare).pad_id == 3  # eos


def test_no_document_is_left(make):
    with pytest.raises(DataError, match=r"rows\.jsonl is left: text -> 0 documents; 2 empty, left out"):
        make([{"text": ""}, {"text": " "}])


def test_a_model_with_fewer_words_or_positions_is_refused(make):
    data = make([{"text": "abcdefghij"}])
    data.check_model(llama())
    data.check_model(torch.nn.Linear(1, 1))  # of which nothing is known
    with pytest.raises(ConfigError, match=r"the data has the token 82 of the tokenizer of .*, and LlamaForCausalLM has 80 words"):  # fmt: skip  # noqa: E501
        data.check_model(llama(words=80))
    with pytest.raises(ConfigError, match=r"a document has 11 tokens, and LlamaForCausalLM has 8 positions: give data\.sequence_length=8"):  # fmt: skip  # noqa: E501
        data.check_model(llama(positions=8))


def test_a_classifier_that_finds_the_end_of_a_text_by_another_token_is_refused(make):
    data = make([{"text": "abc", "n": 1}], label="n")
    model = LlamaForSequenceClassification(llama(words=265).config)
    with pytest.raises(ConfigError, match=r"by pad_token_id=None of .* rows with 0: give \+model\.pad_token_id=0"):
        data.check_model(model)
    model.config.pad_token_id = data.pad_id
    data.check_model(model)
