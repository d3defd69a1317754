"""Answers in the formats of Anthropic's messages and OpenAI's responses equal those of chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.test_api import HELLO, SCHEMA, TOOLS, chat
from tests.serving.test_constrained import fits

SEED = 2
"""Seed with which the random model writes 20 tokens and more."""
FLAT = [{"type": "function", **TOOLS[0]["function"]}]
INPUT_TOOLS = [{"name": "f", "description": "Does it.", "input_schema": SCHEMA}]


def message(client: Any, **body: Any) -> Any:
    usual = {"model": "talker", "messages": HELLO, "max_tokens": 20, "seed": SEED}
    return client.post("/v1/messages", json={**usual, **body})


def respond(client: Any, **body: Any) -> Any:
    usual = {"model": "talker", "input": HELLO, "max_output_tokens": 20, "seed": SEED}
    return client.post("/v1/responses", json={**usual, **body})


def named(response: Any) -> list[Any]:
    """Events of a stream, whose names their data repeat."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_message_equals_the_chat(client: Any) -> None:
    expected = chat(client, max_tokens=20, seed=SEED, temperature=1.0).json()
    found = message(client, temperature=1.0).json()
    assert found["content"] == [{"type": "text", "text": expected["choices"][0]["message"]["content"]}]
    assert found["usage"] == {"input_tokens": expected["usage"]["prompt_tokens"], "output_tokens": 20}
    assert (found["type"], found["role"], found["stop_reason"], found["stop_sequence"]) == (
        "message", "assistant", "max_tokens", None,
    )  # fmt: skip
    count = client.post("/v1/messages/count_tokens", json={"model": "talker", "messages": HELLO}).json()
    assert count == {"input_tokens": found["usage"]["input_tokens"]}
    events = named(message(client, temperature=1.0, stream=True))
    kinds = [one["type"] for one in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta")
    assert text == found["content"][0]["text"] and events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[0]["message"]["usage"]["input_tokens"] == found["usage"]["input_tokens"]
    assert events[-2]["usage"] == {"output_tokens": 20}


def test_stop_sequence_is_named(client: Any) -> None:
    text = message(client, temperature=1.0).json()["content"][0]["text"]
    found = message(client, temperature=1.0, stop_sequences=["zzz", text[5:7]]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[5:7])
    assert found["content"][0]["text"] == text[: text.index(text[5:7])]


def test_message_with_tools(client: Any) -> None:
    pytest.importorskip("llguidance")
    choice = {"type": "tool", "name": "f"}
    body = {"tools": INPUT_TOOLS, "tool_choice": choice, "max_tokens": 100, "temperature": 1.0}
    found = message(client, **body).json()
    (block,) = found["content"]
    assert block["type"] == "tool_use" and block["id"].startswith("toolu_") and fits(block["input"])
    assert found["stop_reason"] == "tool_use"
    events = named(message(client, **body, stream=True))
    (delta,) = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == block["input"] and events[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "noon"}]}
    more = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    asked = {"model": "talker", "messages": [*HELLO, *more], "tools": INPUT_TOOLS, "system": "Be brief."}
    assert client.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"] > 500
    assert message(client, **asked, max_tokens=2).status_code == 200


def test_system_message_precedes_the_chat(client: Any) -> None:
    blocks = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    found = message(client, system=blocks).json()
    system = [{"role": "system", "content": "Be brief."}]
    expected = chat(client, messages=system + HELLO, max_tokens=20, seed=SEED).json()
    assert found["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    labelled = [{"role": "user", "content": "Hello", "phase": "final_answer"}]
    for given in ("Hello", labelled):
        plain = respond(client, instructions="Be brief.", input=given).json()
        assert plain["output"][0]["content"][0]["text"] == found["content"][0]["text"]


def test_response_equals_the_chat(client: Any) -> None:
    expected = chat(client, max_tokens=20, seed=SEED, temperature=1.0, logprobs=True, top_logprobs=2).json()
    body = {"temperature": 1.0, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = respond(client, **body).json()
    (item,) = found["output"]
    (part,) = item["content"]
    assert part["text"] == expected["choices"][0]["message"]["content"]
    assert part["logprobs"] == expected["choices"][0]["logprobs"]["content"]
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["usage"]["total_tokens"] == expected["usage"]["total_tokens"] and found["store"] is False
    assert found["temperature"] == 1.0 and found["top_p"] == 1.0
    unset = respond(client, max_output_tokens=1).json()  # the defaults of the model's folder
    assert unset["temperature"] == 0.0 and unset["top_p"] == 1.0
    events = named(respond(client, **body, stream=True))
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(one["delta"] for one in deltas) == part["text"]
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["content"] == [part]
    kinds = [one["type"] for one in events if "delta" not in one["type"]]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip


def test_response_with_tools_and_schema(client: Any) -> None:
    pytest.importorskip("llguidance")
    body = {"tools": FLAT, "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 100}
    (call,) = respond(client, **body).json()["output"]
    assert call["type"] == "function_call" and fits(json.loads(call["arguments"]))
    events = named(respond(client, **body, stream=True))
    done = next(one for one in events if one["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == call["arguments"] and events[-1]["type"] == "response.completed"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    assert respond(client, input=[*HELLO, call, result], tools=FLAT, max_output_tokens=2).status_code == 200
    text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    (item,) = respond(client, text=text, max_output_tokens=100).json()["output"]
    assert fits(json.loads(item["content"][0]["text"]))


REFUSED = {
    "no length": ("messages", {"max_tokens": None}, 400),
    "model": ("messages", {"model": "nothing"}, 404),
    "thinking": ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400),
    "image": ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400),
    "choice": ("messages", {"tools": INPUT_TOOLS, "tool_choice": {"type": "tool"}}, 400),
    "other choice": ("messages", {"tools": INPUT_TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, 400),
    "long prompt": ("messages", {"messages": [{"role": "user", "content": "a" * 1100}]}, 400),
    "hot": ("messages", {"temperature": 1.5}, 400),
    "store": ("responses", {"store": True}, 400),
    "previous": ("responses", {"previous_response_id": "resp_1"}, 400),
    "reasoning": ("responses", {"reasoning": {"effort": "low"}}, 400),
    "truncation": ("responses", {"truncation": "auto"}, 400),
    "tool": ("responses", {"tools": [{"type": "web_search"}]}, 400),
    "top": ("responses", {"top_logprobs": 2}, 400),
    "empty": ("responses", {"input": []}, 400),
    "item": ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, 400),
    "long input": ("responses", {"input": "a" * 1100}, 400),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_request_is_refused(client: Any, case: str) -> None:
    kind, body, status = REFUSED[case]
    found = (message if kind == "messages" else respond)(client, **body)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert "\n" not in error["message"] and "Traceback" not in error["message"]
    if kind == "messages":
        assert found.json()["type"] == "error"
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_template_is_applied(client: Any) -> None:
    found = client.post("/apply-template", json={"model": "talker", "messages": HELLO}).json()
    assert found == {"prompt": "<u>Hello\n<a>", "count": 12}


def test_metrics_count(client: Any) -> None:
    def value(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next((line.split()[-1] for line in lines if line.startswith(name)), 0))

    completion = 'glassformer_tokens_total{model="talker",kind="completion"}'
    first = 'glassformer_first_token_seconds_count{model="talker"}'
    route = 'glassformer_requests_total{route="/v1/messages",status="200"}'
    before = value(completion), value(first), value(route)
    message(client, max_tokens=7)
    assert (value(completion), value(first), value(route)) == (before[0] + 7, before[1] + 1, before[2] + 1)
    client.get("/a%22b%0A")
    assert value('glassformer_requests_total{route="other",status="404"}') > 0 and value("glassformer_calls") == 0


def test_document_describes_every_route(client: Any) -> None:
    found = client.get("/openapi.json").json()
    assert found["openapi"] == "3.1.0" and "/v1/messages" in found["paths"]
    chat_fields = found["components"]["schemas"]["ChatRequest"]
    assert chat_fields["additionalProperties"] is False
    assert chat_fields["properties"]["seed"]["description"].startswith("Seed of the draws")
    references = json.dumps(found)
    for name in {part.split('"')[0] for part in references.split("#/components/schemas/")[1:]}:
        assert name in found["components"]["schemas"]
