"""Makes a small language model to try fine-tuning with: `python -m ddp_hydra.finetune.small_base base`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from ddp_hydra.data.names import is_of
from ddp_hydra.finetune.models import imported

BATCH, LENGTH = 16, 64
HOLDOUT = 0.1
"""Share of the topics that is kept for validation."""
TEMPLATE = (
    "{% for one in messages %}<|{{ one.role }}|>{{ one.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder: Path, steps: int = 100, vocab_size: int = 512, width: int = 64, depth: int = 2) -> None:
    """Write a Llama with its tokenizer, both made of the texts of Python's `help`, and these: train.jsonl, val.jsonl.

    Args:
        folder: to write.
        steps: of its training.
        vocab_size: number of tokens.
        width: of each layer.
        depth: number of layers.
    """
    transformers, tokenizers = imported("transformers"), imported("tokenizers")
    texts = write_texts(folder)
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    learned.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned,
        chat_template=TEMPLATE,
        **dict(zip(("bos_token", "eos_token", "pad_token"), specials, strict=False)),
    )
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(config)
    train(model, [token for ids in tokenizer(texts)["input_ids"] for token in ids], steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_texts(folder: Path) -> list[str]:
    # It returns the texts for training.
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    for split in ("val", "train"):
        found = [text for name, text in sorted(topics.items()) if is_of(name, HOLDOUT, split)]
        texts[split] = [part for text in found for part in text.split("\n\n") if part.strip()]
        rows = "".join(json.dumps({"text": part}) + "\n" for part in texts[split])
        (folder / f"{split}.jsonl").write_text(rows)
    return texts["train"]


def train(model: Any, tokens: list[int], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    size = BATCH * LENGTH
    for batch in torch.tensor(tokens[: min(steps, len(tokens) // size) * size]).reshape(-1, BATCH, LENGTH):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is small
    make(Path(sys.argv[1]))
