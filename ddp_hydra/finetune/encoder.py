"""Makes tokens of rows of text: documents, prompts with completions, and chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ddp_hydra import heartbeat
from ddp_hydra.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates of chats know."""
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Document = tuple[list[int], list[bool] | None]
"""Tokens, and which of them the loss counts; None: all."""


class State(IntEnum):
    """Tells what became of a row."""

    WHOLE = 0
    CUT = 1
    EMPTY = 2
    TOO_LONG = 3
    UNANSWERED = 4


@dataclass(frozen=True)
class Encoder:
    """Makes rows of tokens of a batch of rows; `datasets.map` calls it.

    conf/data/text.yaml describes most arguments.

    Args:
        tokenizer: of transformers, with the template of chats.
        are_chats: the column holds lists of messages.
        closes: a document that is truncated keeps the special tokens at its end, as [SEP].
        least: fewest tokens of a document.
        name: of the source, for messages.
    """

    tokenizer: Any
    columns: tuple[str, ...]
    are_chats: bool
    label: str | None
    length: int
    overflow: str
    eos: bool
    closes: bool
    least: int
    roles: Mapping[str, str]
    name: str

    def __call__(self, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        heartbeat.progress()
        made: dict[str, list[Any]] = {name: [] for name in ("input_ids", "counted", "label", "row", "state")}
        labels = rows[self.label] if self.label else [0] * len(numbers)
        labels = [int(label) if isinstance(label, bool) else label for label in labels]
        for number, label, document in zip(numbers, labels, self._documents(rows, numbers), strict=True):
            for (ids, counted), state in self._pieces(document):
                kept = state in (State.WHOLE, State.CUT)
                values = (ids if kept else [], counted if kept and counted else [], label, number, state)
                for name, value in zip(made, values, strict=True):
                    made[name].append(value)
        return made

    def _documents(self, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> Iterator[Document]:
        if self.are_chats:
            yield from (self._chat(messages, row) for messages, row in zip(rows[self.columns[0]], numbers, strict=True))
        elif len(self.columns) == 2:
            pairs = zip(*(rows[column] for column in self.columns), numbers, strict=True)
            yield from (self._pair(prompt or "", completion or "", row) for prompt, completion, row in pairs)
        else:
            texts = [text or "" for text in rows[self.columns[0]]]
            found = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
            end = self.tokenizer.eos_token_id
            for text, ids in zip(texts, found, strict=True):
                yield ([], None) if not text.strip() else (ids + [end] * (self.eos and ids[-1:] != [end]), None)

    def _pieces(self, document: Document) -> Iterator[tuple[Document, State]]:
        ids, counted = document
        if len(ids) < self.least:
            yield ([], None), State.EMPTY
        elif len(ids) > self.length and self.overflow == "drop":
            yield ([], None), State.TOO_LONG
        else:
            state = State.CUT if len(ids) > self.length else State.WHOLE
            last = len(ids) if self.overflow == "split" else 1
            if self.closes and state is State.CUT and last == 1:  # as transformers truncates
                end = next((n for n, one in enumerate(reversed(ids)) if one not in self.tokenizer.all_special_ids), 0)
                ids = ids[: self.length - end] + ids[len(ids) - end :]
            for begin in range(0, last, self.length):
                piece = ids[begin : begin + self.length], counted and counted[begin : begin + self.length]
                is_answered = piece[1] is None or any(piece[1][1:])  # nothing predicts the first token
                if not begin or len(piece[0]) >= self.least:
                    yield piece, state if is_answered else State.UNANSWERED
                state = State.WHOLE

    def _pair(self, prompt: str, completion: str, row: int) -> Document:
        if not completion.strip():
            raise self._mistake(row, f"has an empty {self.columns[1]}: leave the row out")
        ids, counted = self._tokens(prompt + completion, [(len(prompt), len(prompt) + len(completion))], special=True)
        end = self.tokenizer.eos_token_id
        if ids[-1:] == [end]:
            counted[-1] = True
        elif self.eos:
            ids, counted = [*ids, end], [*counted, True]
        return ids, counted

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]], special: bool) -> tuple[list[int], list[bool]]:
        options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
        found = self.tokenizer(text, add_special_tokens=special, **options)
        counted = [
            begin < end and any(begin < last and end > first for first, last in spans)
            for begin, end in found["offset_mapping"]
        ]
        return found["input_ids"], counted

    # -- chats -------------------------------------------------------------------------------------------------

    def _chat(self, given: Any, row: int) -> Document:
        messages = [self._message(message, row) for message in given or ()]
        if all(message["role"] != "assistant" for message in messages):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "no messages"
            raise self._mistake(row, f"has no answer, a message of the role assistant, only {roles}: leave the row out")
        if not _MARKS_ANSWERS.search(str(self.tokenizer.get_chat_template())):
            return self._tokens(*self._answers(messages, row), special=False)
        marked: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        marked["tokenizer_kwargs"] = {"verbose": False}
        found = self._apply(messages, row, **marked)
        counted = [bool(one) for one in found["assistant_masks"]]
        if not any(counted):
            raise self._mistake(row, "has no token that the chat template marks by {% generation %}")
        return found["input_ids"], counted

    def _message(self, message: Any, row: int) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            what = f"has a message that is a {type(message).__name__}: write messages as {{role: …, content: …}}"
            raise self._mistake(row, what)
        values = {key: value for key, value in message.items() if value is not None}
        if not isinstance(role := values.get("role"), str):
            raise self._mistake(row, f"has a message with {', '.join(values)}: name its keys role and content")
        role = self.roles.get(role, role)
        if role not in ROLES and role not in self.roles.values():
            meant = "user" if role.lower() in ("human", "prompter", "question") else "assistant"
            raise self._mistake(
                row,
                f"has a message of the role {role}, which is none of {', '.join(ROLES)}: give data.roles='{{{role}: "
                f"{meant}}}', with all roles of the data that have other names",
            )
        content = values.get("content")
        is_empty = not (content.strip() if isinstance(content, str) else content)
        if role == "assistant" and values.keys() <= {"role", "content"} and is_empty:
            raise self._mistake(row, "has an empty answer: leave the row out")
        return {**values, "role": role}

    def _answers(self, messages: Sequence[Mapping[str, Any]], row: int) -> tuple[str, list[tuple[int, int]]]:
        # The text of a chat and the spans of its answers: what the template adds to the messages before.
        def render(some: Sequence[Mapping[str, Any]], **options: Any) -> str:
            return str(self._apply(some, row, tokenize=False, **options))

        whole, spans = render(messages), []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            history, before, after = messages[:place], "", render(messages[: place + 1])
            begin = -1
            if history:
                before = render(history, add_generation_prompt=True)
                begin = len(before) if before != render(history) else -1
            if begin < 0:  # what the template writes before an answer is not known
                text = message.get("content")
                begin = after.find(text.strip(), len(before)) if isinstance(text, str) else -1
            if begin < 0 or not after.startswith(before) or not whole.startswith(after):
                raise self._mistake(
                    row,
                    f"can't be trained on: the chat template writes its message {place}, an answer, or the ones before "
                    "otherwise once others follow. Give data.chat_template=<file> of one with {% generation %} around "
                    "the answers, or rows that end with their only answer",
                )
            spans.append((begin, len(after)))
        return whole, spans

    def _apply(self, messages: Sequence[Mapping[str, Any]], row: int, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise self._mistake(row, f"is refused by the chat template: {error}") from error

    def _mistake(self, row: int, what: str) -> DataError:
        return DataError(f"row {row} of {self.name}, counted from 0, {what}")
