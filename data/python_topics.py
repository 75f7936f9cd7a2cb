"""Texts of Python's `help`, cut into blocks of tokens for a language model of transformers."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_hydra.data.names import check, is_of
from ddp_hydra.finetune.models import load_tokenizer


class PythonTopics(Dataset):
    """Blocks of tokens of the texts that Python's `help` shows of its topics.

    Args:
        tokenizer: folder, or name on the hub of Hugging Face.
        length: tokens of a block.
        holdout: share of the topics kept for validation, 0..1, chosen by a hash of each name.
        split: "train": the topics not held out; "val": the others.

    Attributes:
        blocks: (samples, length), token numbers.
    """

    thread_safe = True

    def __init__(self, tokenizer: str, length: int = 64, holdout: float = 0.1, split: str = "train") -> None:
        check(holdout, split)
        encoder = load_tokenizer(tokenizer)
        texts = [text for name, text in sorted(topics.items()) if is_of(name, holdout, split)]
        tokens = [token for ids in encoder(texts)["input_ids"] for token in [*ids, encoder.eos_token_id]]
        self.blocks = torch.tensor(tokens[: len(tokens) // length * length]).reshape(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a block, each (length,): `labels` are what is to be predicted."""
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}
