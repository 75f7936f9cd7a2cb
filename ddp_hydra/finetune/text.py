"""A data set of tokens: text and a tokenizer become rows that models of transformers take."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ddp_hydra import heartbeat
from ddp_hydra.console.text import counted, listed
from ddp_hydra.data import huggingface
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.finetune import models
from ddp_hydra.finetune.encoder import Encoder, State
from ddp_hydra.storage.urls import as_text
from ddp_hydra.tasks.counting import IGNORED
from ddp_hydra.tasks.model_loss import found

FORMAT = 2
"""Counts the versions of the files of tokens: a change of the encoder makes them anew."""
KINDS = (("messages",), ("prompt", "completion"), ("text",))
"""Columns that are taken if the config names none."""
OVERFLOW = {"truncate": "cut off at", "split": "split at", "drop": "longer than"}


class TokenizedText(Dataset):
    """Gives dicts of tokens: input_ids, labels, and attention_mask or, where documents are packed, position_ids.

    The tokens are made once and kept in files. Labels are the tokens that the loss counts, else -100: all of a
    document, the completion of a prompt, the answers of a chat. Packed documents do not see each other: position_ids
    begin anew at each, and the model is called with use_cache=False, without which transformers does not tell them
    apart.

    conf/data/text.yaml describes the arguments; others are of `datasets.load_dataset`.

    Attributes:
        n_documents: documents that are left.
        num_classes: of the labels, with `label`.

    Raises:
        ConfigError: the tokenizer lacks a token or a template, or there is no such column.
        DataError: a row has no answer or an unknown role, or no document is left.
    """

    thread_safe = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str],
        subset: str | None = None,
        split: str = "train",
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        columns: Sequence[str] | str | None = None,
        label: str | None = None,
        sequence_length: int = 512,
        overflow: str = "truncate",
        packing: bool = False,
        flatten: bool = False,
        eos: bool = True,
        chat_template: str | os.PathLike[str] | None = None,
        roles: Mapping[str, str] | None = None,
        mask: float = 0.0,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        self.sequence_length, self.overflow, self.mask = sequence_length, overflow, mask
        self.packing, self.flatten = packing, flatten
        self.label, self.tokenizer = label, str(tokenizer)
        self._check_options()
        named: Any = as_text(files)
        source = huggingface.read(path, subset, split, named, cache_dir=cache_dir, **options)
        self.columns = _columns(source, columns, label)
        are_chats = len(self.columns) == 1 and not _is_text(source, self.columns[0])
        words = load_tokenizer(self.tokenizer, as_text(chat_template))
        is_causal = not label and not mask
        eos = bool(eos and is_causal and not are_chats)
        self._take_tokens(words, eos, are_chats)
        where = named if isinstance(named, str) else ", ".join(named or [str(path)])
        least, known = 2 if is_causal else 1, dict(roles or {})
        kinds = (are_chats, label, sequence_length, overflow, eos, not is_causal, least, known)
        encoder = Encoder(words, self.columns, *kinds, where)
        self.data = _tokenized(source, encoder, cache_dir)
        table = self.data.data
        self._states = np.bincount(table.column("state").to_numpy(), minlength=len(State))
        import pyarrow.compute

        lengths = np.asarray(pyarrow.compute.list_value_length(table.column("input_ids")))
        self.documents = np.flatnonzero(lengths)
        self.lengths = lengths[self.documents]
        self.n_documents = len(self.documents)
        if not self.n_documents:
            raise DataError(f"no document of {where} is left: {self.described()}")
        self.rows = packed(self.lengths, sequence_length) if packing else None
        if label:
            self._take_classes(source, label)

    def _check_options(self) -> None:
        if self.overflow not in OVERFLOW:
            raise ConfigError(f"data.overflow={self.overflow}: give one of {', '.join(OVERFLOW)}")
        if self.flatten and not self.packing:
            raise ConfigError("data.flatten=true is of packed rows: give data.packing=true, too")
        if self.sequence_length < 2:
            raise ConfigError(f"data.sequence_length={self.sequence_length}: give 2 or more")
        if not 0 <= self.mask < 1:
            raise ConfigError(f"data.mask={self.mask} is a share of the tokens: give data.mask=0.15")
        for name, given in (("label", self.label), ("mask", self.mask)):
            if given and self.packing:
                raise ConfigError(f"data.{name}={given} does not go with packed documents: give data.packing=false")
        if self.label and (self.mask or self.overflow == "split"):
            other = f"mask={self.mask}" if self.mask else "overflow=split"
            raise ConfigError(f"data.label={self.label} is of whole texts: leave data.{other} out")

    def _take_tokens(self, words: Any, eos: bool, are_chats: bool) -> None:
        for name, given in (("label", self.label), ("mask", self.mask)):
            if given and (len(self.columns) == 2 or (are_chats and name == "mask")):
                raise ConfigError(
                    f"data.{name}={given} is of texts in one column, and the columns are {', '.join(self.columns)}: "
                    "join them, and give data.columns=[<text>]"
                )

        def lacks(what: str, advice: str) -> ConfigError:
            return ConfigError(f"the tokenizer of {self.tokenizer} has no {what}: {advice}")

        if are_chats and not words.chat_template:
            raise lacks("chat template", "give data.chat_template=<file>, or columns of text or prompt and completion")
        if (are_chats or len(self.columns) == 2) and not words.is_fast:
            raise lacks("offsets of tokens, which tell answers from prompts", "give a fast one (tokenizer.json)")
        if eos and words.eos_token_id is None:
            raise lacks("eos_token, which ends documents", "save it with one, or give data.eos=false")
        if self.label and words.pad_token_id is None:
            raise lacks("pad_token, by which a classifier knows the end of a text", "save it with one")
        if self.mask and words.mask_token_id is None:
            raise lacks("mask_token", "give data.mask=0, or the tokenizer of a masked language model")
        ids = (words.pad_token_id, words.eos_token_id, 0)  # the mask hides what fills rows
        self.pad_id = next(one for one in ids if one is not None)
        self.mask_id, self.n_words = words.mask_token_id, len(words)
        self.special = torch.tensor(words.all_special_ids)
        self.thread_safe = not self.mask  # it draws

    def _take_classes(self, source: Any, label: str) -> None:
        column = self.data.data.column("label")
        if column.null_count:
            raise DataError(f"the column {label} has {counted(column.null_count, 'empty cell')}: leave these rows out")
        values = column.to_numpy()[self.documents]
        if names := getattr(source.features[label], "names", None):
            self.classes = list(names)
        if values.dtype.kind in "iu":
            self.num_classes = int(values.max()) + 1

    def __len__(self) -> int:
        return self.n_documents if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a document, or a row of packed documents, (sequence_length,) each."""
        if self.rows is None:
            return self._document(range(len(self))[index])
        return self._row([self._document(int(one)) for one in self.rows[index]])

    def _document(self, number: int) -> dict[str, Tensor]:
        row = self.data[int(self.documents[number])]
        ids = torch.tensor(row["input_ids"])
        labels = ids
        if self.label:
            labels = torch.tensor(row["label"])
        elif row["counted"]:
            labels = ids.where(torch.tensor(row["counted"]), IGNORED)
        elif self.mask:
            ids, labels = self._masked(ids)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    def _masked(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        # As BERT: of the chosen tokens 80 % are masked, and 10 % are any others.
        chosen = (torch.rand(len(ids)) < self.mask) & ~torch.isin(ids, self.special)
        how, others = torch.rand(len(ids)), torch.randint(self.n_words, (len(ids),))
        changed = ids.where(~chosen | (how >= 0.8), self.mask_id).where(~chosen | (how < 0.8) | (how >= 0.9), others)
        return changed, ids.where(chosen, IGNORED)

    def _row(self, documents: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        rest = self.sequence_length - sum(len(one["input_ids"]) for one in documents)
        filling = [torch.full((rest,), self.pad_id)] if rest else []
        ids = [*(one["input_ids"] for one in documents), *filling]
        # The last token of a document does not predict the first one of the next.
        labels = [torch.cat([torch.tensor([IGNORED]), one["labels"][1:]]) for one in documents]
        labels += [torch.full((rest,), IGNORED)] if rest else []
        positions = [torch.arange(len(one)) for one in ids]
        parts = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.cat(several) for name, several in parts.items()}

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """Return a batch: documents are padded to the longest one, rows are stacked."""
        fill = {"input_ids": self.pad_id, "labels": IGNORED, "attention_mask": 0}
        batch: dict[str, Any] = {}
        for name, first in samples[0].items():
            values = [sample[name] for sample in samples]
            batch[name] = pad_sequence(values, True, fill.get(name, 0)) if first.ndim else torch.stack(values)
        if "position_ids" in batch:
            if self.flatten:
                batch = {name: part.reshape(1, -1) for name, part in batch.items()}
            batch["use_cache"] = False
        return batch

    def described(self) -> str:
        documents = f"{' + '.join(self.columns)} -> {counted(self.n_documents, 'document')}"
        of_states = {
            State.CUT: f"{OVERFLOW[self.overflow]} {self.sequence_length} tokens",
            State.EMPTY: "empty, left out",
            State.TOO_LONG: f"longer than {self.sequence_length} tokens, left out",
            State.UNANSWERED: f"without an answer in {self.sequence_length} tokens, left out",
        }
        notes = [f"{self._states[state]:,} {what}" for state, what in of_states.items() if self._states[state]]
        if getattr(self, "rows", None) is not None:
            full = self.lengths.sum() / (len(self) * self.sequence_length)
            documents += f" in {counted(len(self), 'row')} of {self.sequence_length} tokens, {full:.0%} full"
        return "; ".join([documents, *notes])

    def check_model(self, model: Any) -> None:
        import pyarrow.compute

        table, name = self.data.data, type(model).__name__
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        words = getattr(embeddings, "num_embeddings", None)
        largest = pyarrow.compute.max(pyarrow.compute.list_flatten(table.column("input_ids"))).as_py()
        if words is not None and max(largest, self.pad_id) >= words:
            raise ConfigError(
                f"the data has the token {max(largest, self.pad_id)} of the tokenizer of {self.tokenizer}, and {name} "
                f"has {words} words: give data.tokenizer=<the model's own>, or a model with resized embeddings"
            )
        self._check_vocabulary(model)
        if models.is_of_transformers(model) and name.endswith("ForMaskedLM") and not (self.mask or self.packing):
            raise ConfigError(f"{name} predicts masked tokens, and data.mask={self.mask}: give data.mask=0.15")
        pad = getattr(getattr(model, "config", None), "pad_token_id", None)
        if self.label and models.is_of_transformers(model) and hasattr(model, "score") and pad != self.pad_id:
            raise ConfigError(
                f"{name} finds the end of a text by pad_token_id={pad} of its config, and the tokenizer of "
                f"{self.tokenizer} fills rows with {self.pad_id}: give +model.pad_token_id={self.pad_id}"
            )
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if isinstance(positions, int) and self.lengths.max() > positions > 0:
            raise ConfigError(
                f"a document has {self.lengths.max()} tokens, and {name} has {positions} positions: give "
                f"data.sequence_length={positions}"
            )
        if self.packing:
            check_apart(model, words or self.n_words, flat=self.flatten)

    def _check_vocabulary(self, model: Any) -> None:
        source = getattr(model, "pretrained", None)
        if source is None or self.tokenizer in (source.path, str(source.folder)):
            return
        own = models.tokenizer_of(model)
        known = own.get_vocab() if own is not None else {}
        for word, number in models.load_tokenizer(self.tokenizer).get_vocab().items():
            if known.get(word, number) != number:
                raise ConfigError(
                    f"the tokenizer of {self.tokenizer} numbers {word!r} as {number}, and the one of model.path="
                    f"{source.path} as {known[word]}: give data.tokenizer={source.path}"
                )


def check_apart(model: Any, words: int, flat: bool = False) -> None:
    # The second documents of two rows are equal, and the first ones must not change their logits. `flat`: each row is a
    # batch.
    first = next(model.parameters(), torch.empty(0))
    ids = torch.tensor([[1, 2, 3, 4, 3], [4, 3, 3, 4, 3]], device=first.device) % words
    positions = torch.tensor([[0, 1, 0, 1, 2]] * 2, device=first.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            batches = zip(*(rows.split(1 if flat else 2) for rows in (ids, positions)), strict=True)
            outputs = [model(input_ids=some, position_ids=at, use_cache=False) for some, at in batches]
    except TypeError as error:
        raise ConfigError(f"{_leaks(model)} ({error})") from error
    finally:
        model.train(was_training)
    logits = [found(output, "logits") for output in outputs]
    if all(isinstance(one, Tensor) and one.ndim == 3 for one in logits):
        one, other = torch.cat(logits)[:, 2:].float()
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max())):
            raise ConfigError(_leaks(model))


def _leaks(model: Any) -> str:
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    how = f" with the attention {kind}" if kind else ""
    return (
        f"{type(model).__name__}{how} does not keep documents of one row apart by their position_ids: give "
        "data.packing=false, or a causal model of transformers with the attention sdpa"
    )


def load_tokenizer(name: str, chat_template: str | None = None) -> Any:
    try:
        tokenizer = models.load_tokenizer(name)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer={name}: {error}") from error
    if chat_template is not None:
        is_text = "{" in chat_template
        if not is_text and not Path(chat_template).is_file():
            raise ConfigError(f"data.chat_template={chat_template} is no file: give one, or the template itself")
        tokenizer.chat_template = chat_template if is_text else Path(chat_template).read_text()
    return tokenizer


def packed(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    # The longest document first, each in the fullest row that has room for it.
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # tokens that are free -> rows
    rooms: list[int] = []  # in order
    for document in np.argsort(-lengths, kind="stable").tolist():
        length, room = int(lengths[document]), size
        at = bisect_left(rooms, length)
        if at == len(rooms):
            rows.append([])
            row = len(rows) - 1
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        rows[row].append(document)
        if rest := room - length:
            if not with_room[rest]:
                insort(rooms, rest)
            with_room[rest].append(row)
    return [np.asarray(row) for row in rows]


def _is_text(source: Any, column: str) -> bool:
    return getattr(source.features[column], "dtype", None) in ("string", "large_string", "null")


def _is_chats(feature: Any) -> bool:
    import datasets

    return isinstance(getattr(feature, "feature", feature), (dict, datasets.Json))  # of a list, its messages


def _columns(source: Any, given: Sequence[str] | str | None, label: str | None) -> tuple[str, ...]:
    import datasets

    there = list(source.column_names)
    names = tuple(listed(given))
    if not names:
        names = next((kind for kind in KINDS if all(name in there for name in kind)), ())
    if not 1 <= len(names) <= 2:
        raise ConfigError(
            f"the columns are {', '.join(there)}: give data.columns=[<text>], [<messages>] or [<prompt>,<completion>]"
        )
    if missing := [name for name in (*names, *([label] if label else [])) if name not in there]:
        key = "label" if missing == [label] else "columns"
        raise ConfigError(f"there is no column {', '.join(missing)}, only {', '.join(there)}: give data.{key}=…")
    if not given and names == ("messages",) and _is_text(source, "messages"):
        raise ConfigError(
            "the column messages holds text, not lists of messages with role and content: write them as lists, or give "
            "data.columns=[messages] to take them as documents"
        )
    for name in names:
        feature = source.features[name]
        if isinstance(feature, datasets.Json) and not any(isinstance(one, (list, dict)) for one in source[:100][name]):
            raise ConfigError(f"the column {name} holds values of several kinds: write text in each row")
        if _is_text(source, name) or (len(names) == 1 and _is_chats(feature)):
            continue
        if _is_chats(feature):
            raise ConfigError(
                f"the columns {' and '.join(names)} hold lists of messages: join each two to one list, in a column "
                "messages"
            )
        raise ConfigError(f"the column {name} holds {feature}, not text: give data.columns=[…]")
    if label and source.features[label].dtype in ("string", "large_string"):
        raise ConfigError(f"the column {label} holds text: write the numbers of the classes, 0, 1, 2, …")
    return names


def _tokenized(source: Any, encoder: Encoder, cache_dir: str | None) -> Any:
    # One process of a host makes the tokens, and the others read its file.
    import datasets
    import filelock

    label = source.features[encoder.label].dtype if encoder.label else "int64"
    label = "int64" if label == "bool" else label
    kinds = {"input_ids": "int32", "counted": "bool"}
    features = datasets.Features(
        {name: datasets.Sequence(datasets.Value(kind)) for name, kind in kinds.items()}
        | {"label": datasets.Value(label), "row": datasets.Value("int64"), "state": datasets.Value("int8")}
    )
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    name = _fingerprint(source, encoder)
    lock = filelock.FileLock(folder / f"{name}.lock")
    while not lock.is_locked:
        try:
            lock.acquire(timeout=1)
        except filelock.Timeout:
            heartbeat.progress()
    try:
        return source.map(
            encoder,
            with_indices=True,
            batched=True,
            remove_columns=source.column_names,
            features=features,
            cache_file_name=str(folder / f"{name}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=name,
        )
    finally:
        lock.release()


def _fingerprint(source: Any, encoder: Encoder) -> str:
    words = encoder.tokenizer
    backend = getattr(words, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(words.get_vocab(), sort_keys=True)
    settings = {name: value for name, value in vars(encoder).items() if name != "tokenizer"}
    parts = [FORMAT, source._fingerprint, vocabulary, words.chat_template, words.special_tokens_map, settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
