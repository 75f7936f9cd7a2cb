"""A tokenizer, and data sets of tokens of rows that a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_hydra.finetune.text import TokenizedText, load_tokenizer
from tests.support.tiny_llm import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(tokenizer, tmp_path) -> Callable[..., TokenizedText]:
    """Make a data set of rows, which are written as JSON lines."""

    def make(rows: list[Any], **options: Any) -> TokenizedText:
        text, file = "\n".join(map(json.dumps, rows)), tmp_path / "rows.jsonl"
        if not file.exists() or file.read_text() != text:  # its time counts
            file.write_text(text)
        given = {"tokenizer": tokenizer, "cache_dir": str(tmp_path / "cache"), **options}
        return TokenizedText("json", files=str(file), **given)

    return make


@pytest.fixture
def shown(tokenizer) -> Callable[..., list[tuple[str, str]]]:
    """The text of each document, and the part of it that the loss counts."""
    words: Any = load_tokenizer(tokenizer)

    def shown(data: Any) -> list[tuple[str, str]]:
        samples = [data[index] for index in range(len(data))]
        return [(words.decode(one["input_ids"]), words.decode(one["labels"][one["labels"] != -100])) for one in samples]

    return shown


@pytest.fixture
def template(tmp_path) -> Callable[[str], str]:
    """A file of a template."""

    def template(text: str) -> str:
        path: Path = tmp_path / "chat.jinja"
        path.write_text(text)
        return str(path)

    return template
