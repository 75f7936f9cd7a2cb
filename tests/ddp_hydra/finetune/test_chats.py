"""Rows of prompts and of chats: the loss counts the answers alone, or the row is told."""

from __future__ import annotations

import pytest

from ddp_hydra.errors import ConfigError, DataError
from tests.support.tiny_llm import CHAT, MARKED, REWRITES, write_tokenizer

pytestmark = pytest.mark.medium


def chat(*messages: str) -> dict:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": roles[one[0]], "content": one[2:]} for one in messages]}


TURNS = chat("s be", "u hi", "a yo you", "u and", "a bye")
WHOLE = "<|system|>be<|end|><|user|>hi<|end|><|assistant|>yo you<|end|><|user|>and<|end|><|assistant|>bye<|end|>"
NO_PROMPT = CHAT.partition("{% if add")[0]
"""A template that knows no generation prompt."""


@pytest.mark.parametrize("text", [CHAT, MARKED, NO_PROMPT], ids=["prefixes", "marked", "no prompt"])
def test_the_answers_of_several_turns_count(make, shown, template, text):
    data = make([TURNS, chat("u x", "a y")], chat_template=template(text))
    assert shown(data) == [
        (WHOLE, "yo you<|end|>bye<|end|>"),
        ("<|user|>x<|end|><|assistant|>y<|end|>", "y<|end|>"),
    ]


def test_a_chat_may_begin_with_an_answer_and_end_with_a_question(make, shown):
    assert shown(make([chat("a hello", "u x", "a y", "u z")])) == [
        ("<|assistant|>hello<|end|><|user|>x<|end|><|assistant|>y<|end|><|user|>z<|end|>", "hello<|end|>y<|end|>")
    ]


def test_an_answer_behind_the_end_is_left_out_and_counted(make, shown):
    data = make([chat("u " + "x" * 30, "a y"), chat("u x", "a y")], sequence_length=20)
    assert [text for _, text in shown(data)] == ["y<|end|>"]
    assert data.described() == "messages -> 1 document; 1 without an answer in 20 tokens, left out"


def test_other_names_of_roles(make, shown):
    rows = [{"talk": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y"}]}]
    data = make(rows, columns=["talk"], roles={"human": "user", "gpt": "assistant"})
    assert shown(data) == [("<|user|>x<|end|><|assistant|>y<|end|>", "y<|end|>")]


def test_messages_are_not_taken_for_text(make):
    with pytest.raises(ConfigError, match="the column messages holds text, not lists of messages"):
        make([{"messages": "[{}]"}])
    assert make([{"messages": "a b"}], columns=["messages"]).n_documents == 1


STRICT = CHAT.replace(
    "{% for m", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m", 1
)


@pytest.mark.parametrize(
    ("row", "text", "told"),
    [
        (chat("u x"), CHAT, r"has no answer, a message of the role assistant, only user: leave the row out"),
        (chat("u x", "a "), CHAT, r"has an empty answer: leave the row out"),
        ({"messages": "hello"}, CHAT, r"has a message that is a str: write messages as \{role: …, content: …\}"),
        ({"messages": [{"role": "human", "content": "x"}]}, CHAT, r"give data\.roles='\{human: user\}'"),
        ({"messages": []}, CHAT, r"has no answer, a message of the role assistant, only no messages"),
        (
            {"messages": [{"role": "gpt", "content": "x"}, {"role": "assistant", "content": "x"}]},
            CHAT,
            r"has a message of the role gpt, which is none of system, .*: give data\.roles='\{gpt: assistant\}'",
        ),
        (
            {"messages": [{"from": "gpt", "value": "x"}]},
            CHAT,
            r"has a message with from, value: name its keys role and content",
        ),
        (
            TURNS,
            REWRITES,
            r"the chat template writes its message 2, an answer, or the ones before otherwise once others follow",
        ),
        (TURNS, STRICT, r"is refused by the chat template: no system"),
    ],
)
def test_a_row_that_can_not_be_trained_on_is_named(make, template, row, text, told):
    with pytest.raises(DataError, match=rf"row 1 of \S*rows\.jsonl, counted from 0, .*{told}"):
        make([chat("u x", "a y"), row], chat_template=template(text))


def test_a_template_that_rewrites_is_fine_where_the_only_answer_ends_the_chat(make, shown, template):
    assert shown(make([chat("u x", "a y")], chat_template=template(REWRITES))) == [
        ("<|user|>x<|end|><|assistant|>y<|end|>", "y<|end|>")
    ]


def test_a_tokenizer_without_a_template(make, tmp_path):
    bare = write_tokenizer(tmp_path / "bare", chat_template=None)
    with pytest.raises(ConfigError, match=r"has no chat template: give data\.chat_template=<file>"):
        make([TURNS], tokenizer=bare)


def test_the_completion_of_a_prompt_counts(make, shown):
    data = make([{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": "all"}])
    assert shown(data) == [("1+1=2</s>", "2</s>"), ("all</s>", "all</s>")]
    with pytest.raises(DataError, match=r"row 1 of .* has an empty completion: leave the row out"):
        make([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}])
    with pytest.raises(ConfigError, match=r"the columns are a, b: give data\.columns=\[<text>\], \[<messages>\] or"):
        make([{"a": "x", "b": "y"}])
    assert shown(make([{"a": "x", "b": "y"}], columns=["a", "b"], eos=False)) == [("xy", "y")]
