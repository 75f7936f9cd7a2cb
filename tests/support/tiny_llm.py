"""A tokenizer and small models of transformers that are made on the spot, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
REWRITES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% else %}"
    "{{ m['content'] | upper }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(folder: Path, chat_template: str | None = CHAT, **special: str | None) -> str:
    """Write a tokenizer of bytes, without merges, and return its folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*WORDS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "mask_token": "<mask>", **special}
    named = {name: word for name, word in names.items() if word}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **named)
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return str(folder)


def llama(attention: str = "sdpa", words: int = 265, positions: int = 128, **options: Any) -> Any:
    """Return a causal model of two small blocks, the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=words, max_position_embeddings=positions, attn_implementation=attention,
                         initializer_range=0.3, **sizes, **options)  # fmt: skip
    return LlamaForCausalLM(config)
