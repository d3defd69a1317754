"""Answers held to a format, and calls of functions."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from glassformer.loaded import Loaded
from glassformer.serving import requests
from glassformer.serving.app import prompt_of
from glassformer.serving.computing import Computer
from glassformer.serving.requests import ChatRequest
from glassformer.serving.tools import CallReader
from tests.serving.test_api import SCHEMA, TOOLS, chat, complete, events

pytest.importorskip("llguidance", reason="pip install 'glassformer[serve]'")

CALL = '<tool_call>\n{"name": "f", "arguments": {"day": "today", "count": 3}}\n</tool_call>'


def fits(value: Any) -> bool:
    return list(value) == ["day", "count"] and value["day"] in ("today", "tomorrow") and isinstance(value["count"], int)


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_json_schema_holds_in_whole_answers_and_streams(client: Any) -> None:
    body = {"response_format": schema_format(SCHEMA), "temperature": 1.0, "seed": 1, "n": 2, "logprobs": True}
    choices = chat(client, **body).json()["choices"]
    for choice in choices:
        text = choice["message"]["content"]
        assert fits(json.loads(text)) and choice["finish_reason"] == "stop"
        assert b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"]) == text.encode()
    texts = ["", ""]
    for one in events(chat(client, **body, stream=True)):
        for choice in one["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in choices]


def test_json_object_regex_and_grammar(client: Any) -> None:
    found = chat(client, response_format={"type": "json_object"}, max_tokens=200, temperature=1.0, seed=4).json()
    choice = found["choices"][0]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    for field, text, expected in [
        ("regex", "[a-f]{3}( [g-z]{2})?", "[a-f]{3}( [g-z]{2})?"),
        ("grammar", 'start: "yes" | "no"', "yes|no"),
        ("grammar", 'root ::= ("yes" | "no") "."', r"(yes|no)\."),
    ]:
        found = complete(client, **{field: text}, temperature=1.0, seed=2).json()["choices"][0]
        assert re.fullmatch(expected, found["text"]) and found["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_call_has_arguments_of_its_schema(client: Any, choice: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.0, "seed": 3}
    found = chat(client, **body).json()["choices"][0]
    message = found["message"]
    assert found["finish_reason"] == "tool_calls" and message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_") and call["function"]["name"] == "f"
    assert fits(json.loads(call["function"]["arguments"]))
    chunks = [one["choices"][0] for one in events(chat(client, **body, stream=True))]
    deltas = [one["delta"]["tool_calls"][0] for one in chunks if one["delta"].get("tool_calls")]
    assert [one["index"] for one in deltas] == [0] and deltas[0]["function"] == call["function"]
    assert not any(one["delta"].get("content") for one in chunks) and chunks[-1]["finish_reason"] == "tool_calls"


def test_several_calls_and_a_cut_one(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_CALLS", 2)
    body = {"tools": TOOLS, "tool_choice": "required", "logit_bias": {"256": -100}}  # no end before it must be
    found = chat(client, **body).json()["choices"][0]
    assert len(found["message"]["tool_calls"]) == 2 and found["finish_reason"] == "tool_calls"
    cut = chat(client, **body, max_tokens=30).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith("<tool_call>")


def test_free_answer_may_have_no_call(client: Any) -> None:
    found = chat(client, tools=TOOLS, max_tokens=20).json()["choices"][0]
    assert "tool_calls" not in found["message"] and found["message"]["content"]
    none = chat(client, tools=TOOLS, tool_choice="none", max_tokens=20).json()
    plain = chat(client, max_tokens=20).json()
    assert none["choices"][0]["message"] == plain["choices"][0]["message"] and none["usage"] == plain["usage"]


def messages() -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"day": "today", "count": 3}'}}
    return [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "at <s> noon"},
        {"role": "tool", "tool_call_id": "call_1", "content": "later"},
    ]


def test_calls_and_results_are_part_of_the_prompt(client: Any, computer: Computer) -> None:
    session = computer.models["talker"].session
    assert session is not None
    given = ChatRequest(model="talker", messages=messages(), tools=TOOLS)
    text, ids = prompt_of(session, given)
    assert text.index('"description": "Does it."') < text.index("When?") < text.index(CALL) < text.index("noon")
    assert text.count(CALL) == 2 and text.count("<u>") == 2 and text.endswith("<a>")
    assert session.tokenizer is not None and session.tokenizer.decode(ids) == text
    assert chat(client, messages=messages(), max_tokens=2).status_code == 200


def test_template_with_tools_shows_them_itself(talker: Loaded, computer: Computer, tmp_path: Path) -> None:
    from glassformer.generation.session import Session
    from glassformer.text.chat_template import ChatTemplate

    with Session(talker) as session:
        session._template = ChatTemplate(
            "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
            "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.count }}{% endfor %}"
            "{% endfor %}"
        )
        text, _ = prompt_of(session, ChatRequest(model="talker", messages=messages(), tools=TOOLS))
    assert text == "f;<user>When?<assistant><tool_call>3<tool_call>3<tool>at <s> noon<tool>later"


def test_calls_are_read_from_pieces_of_any_length() -> None:
    draw = random.Random(0)
    whole = f"It is <b>{CALL}\n{CALL} <tool_call>nothing</tool_call> <tool_c"
    for _ in range(50):
        reader, shown, calls, left = CallReader(), "", [], whole
        while left:
            size = draw.randint(1, 30)
            text, some = reader.feed(left[:size])
            shown, calls, left = shown + text, calls + some, left[size:]
        shown += reader.close()
        assert [json.loads(one.arguments)["count"] for one in calls] == [3, 3] and len({one.id for one in calls}) == 2
        assert (
            shown.startswith("It is <b>") and shown.endswith("<tool_c") and "nothing" in shown and "today" not in shown
        )
