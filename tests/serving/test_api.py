"""Answers in OpenAI's formats equal those of the library."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch

from glassformer.generation.session import Session
from glassformer.loaded import Loaded

HELLO = [{"role": "user", "content": "Hello"}]


def chat(client: Any, **body: Any) -> Any:
    return client.post("/v1/chat/completions", json={"model": "talker", "messages": HELLO, **body})


def complete(client: Any, **body: Any) -> Any:
    return client.post("/v1/completions", json={"model": "letters", "prompt": "once", **body})


def events(response: Any) -> list[Any]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_health_and_models(client: Any) -> None:
    assert client.get("/health").json()["status"] == "ok"
    models = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    assert set(models) == {"letters", "talker", "encoder"}
    assert client.get("/v1/models/talker").json() == models["talker"]
    assert models["letters"]["context"] == 256 and not models["encoder"]["generates"]
    assert client.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_completion_equals_session(client: Any, letters: Loaded) -> None:
    with Session(letters) as session:
        expected = session.submit("once", max_new_tokens=12, temperature=1.0, seed=3).result()
    found = complete(client, max_tokens=12, temperature=1, seed=3).json()
    assert found["choices"][0] == {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    assert found["object"] == "text_completion" and found["model"] == "letters"


def test_stream_joins_to_the_whole(client: Any) -> None:
    whole = complete(client, max_tokens=12, temperature=1, seed=3, n=2, logprobs=2).json()
    chunks = events(
        complete(client, max_tokens=12, temperature=1, seed=3, n=2, logprobs=2, stream=True,
                 stream_options={"include_usage": True})
    )  # fmt: skip
    *grown, usage = chunks
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and chunk["id"] == chunks[0]["id"] for chunk in grown)
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in grown if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
        for key, values in choice["logprobs"].items():
            assert [value for one in mine if one["logprobs"] for value in one["logprobs"][key]] == values


def test_chat_stream(client: Any) -> None:
    whole = chat(client, max_tokens=9, seed=1, logprobs=True, top_logprobs=2).json()
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and message["refusal"] is None
    chunks = events(chat(client, max_tokens=9, seed=1, logprobs=True, top_logprobs=2, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"] == "" and deltas[-1] == {}
    assert all("role" not in delta for delta in deltas[1:]) and "usage" not in chunks[0]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    entries = [one for chunk in chunks if (part := chunk["choices"][0]["logprobs"]) for one in part["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]


def test_chat_equals_template(client: Any, talker: Loaded) -> None:
    expected = talker.chat("Hello", max_new_tokens=9)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    for messages in (HELLO, parts):
        found = chat(client, messages=messages, max_completion_tokens=9).json()["choices"][0]
        assert found["message"]["content"] == expected.text


def test_bytes_of_entries_are_those_of_the_text(client: Any) -> None:
    for seed in range(4):
        found = chat(client, max_tokens=20, seed=seed, temperature=2, logprobs=True, top_logprobs=1).json()["choices"][
            0
        ]
        entries = found["logprobs"]["content"]
        assert bytes(b for one in entries for b in one["bytes"]) == found["message"]["content"].encode()
        assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 1 for one in entries)


def test_stop_string_is_cut_with_its_logprobs(client: Any) -> None:
    text = complete(client, max_tokens=30, temperature=1, seed=5).json()["choices"][0]["text"]
    stop = text[6:9]
    found = complete(client, max_tokens=30, temperature=1, seed=5, stop=[stop], logprobs=0).json()["choices"][0]
    assert found["finish_reason"] == "stop" and found["text"] == text[: text.index(stop)]
    assert "".join(found["logprobs"]["tokens"]) == found["text"]


def test_echo_scores_the_prompt_as_the_model_does(client: Any, letters: Loaded) -> None:
    ids = letters.tokenizer.encode("once upon a time").tolist()  # type: ignore[union-attr]
    with torch.inference_mode():
        expected = letters.model(torch.tensor([ids]))[0].log_softmax(-1)
    body = {"prompt": [ids, ids[:5]], "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    first, second = complete(client, **body).json()["choices"]
    assert first["text"].startswith("once upon a time") and len(first["text"]) == 17
    found = first["logprobs"]["token_logprobs"]
    assert found[0] is None and first["logprobs"]["top_logprobs"][0] is None
    torch.testing.assert_close(
        torch.tensor(found[1:16]), expected[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4, rtol=0
    )
    assert second["index"] == 1 and len(second["logprobs"]["tokens"]) == 6
    assert first["logprobs"]["text_offset"] == list(range(17))
    alone = complete(client, prompt=ids, max_tokens=1, temperature=0, logprobs=2).json()["choices"][0]
    assert alone["text"] == first["text"][16:]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_new_tokens(client: Any, logprobs: int | None) -> None:
    for stream in (False, True):
        response = complete(client, prompt="abc", echo=True, logprobs=logprobs, max_tokens=0, stream=stream)
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response)]
            assert "".join(one["text"] for one in choices) == "abc" and choices[-1]["finish_reason"] == "length"
        else:
            assert response.json()["choices"][0]["text"] == "abc"
            assert (response.json()["choices"][0]["logprobs"] is None) == (logprobs is None)
            assert response.json()["usage"]["completion_tokens"] == 0


def test_list_of_prompts_has_indices(client: Any) -> None:
    found = complete(client, prompt=["one", "two"], n=2, temperature=1, seed=4, max_tokens=5).json()
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    alone = complete(client, prompt="two", n=2, temperature=1, seed=4, max_tokens=5).json()
    assert [one["text"] for one in found["choices"][2:]] == [one["text"] for one in alone["choices"]]
    assert found["usage"]["prompt_tokens"] == 6 and found["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("name", ["encoder", "letters"])
def test_embeddings(client: Any, encoder: Loaded, letters: Loaded, name: str) -> None:
    loaded = {"encoder": encoder, "letters": letters}[name]
    expected = torch.cat([loaded.embed([text]) for text in ("a text", "b")])
    found = client.post("/v1/embeddings", json={"model": name, "input": ["a text", "b"]}).json()
    torch.testing.assert_close(torch.tensor([one["embedding"] for one in found["data"]]), expected)
    coded = client.post("/v1/embeddings", json={"model": name, "input": ["a text", "b"], "encoding_format": "base64"})
    for one, vector in zip(coded.json()["data"], expected, strict=True):
        raw = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        torch.testing.assert_close(torch.from_numpy(raw.copy()), vector)
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    ids = loaded.tokenizer.encode("b").tolist()  # type: ignore[union-attr]
    by_ids = client.post("/v1/embeddings", json={"model": name, "input": ids}).json()
    torch.testing.assert_close(torch.tensor(by_ids["data"][0]["embedding"]), expected[1])


def test_tokenize_and_back(client: Any) -> None:
    found = client.post("/tokenize", json={"model": "letters", "prompt": "abc"}).json()
    assert found == {"count": 3, "max_model_len": 256, "tokens": found["tokens"]}
    assert client.post("/detokenize", json={"model": "letters", "tokens": found["tokens"]}).json() == {"prompt": "abc"}


def test_null_is_absent_and_ignored_fields_are_named(client: Any) -> None:
    found = complete(client, max_tokens=2, seed=None, logprobs=None, stop=None, user="me", metadata={"a": "b"})
    assert found.status_code == 200 and found.headers["x-glassformer-ignored"] == "user, metadata"
    assert "x-glassformer-ignored" not in complete(client, max_tokens=2).headers


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": parameters}}


SCHEMA = {
    "type": "object",
    "properties": {"day": {"enum": ["today", "tomorrow"]}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["day", "count"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [tool(SCHEMA)]

REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "unknown model": ("chat", {"model": "nothing"}, 404, "model"),
    "path as a model": ("chat", {"model": "../../etc/passwd"}, 404, "model"),
    "hub as a model": ("chat", {"model": "hf:owner/name"}, 404, "model"),
    "encoder": ("chat", {"model": "encoder"}, 400, "model"),
    "unknown field": ("chat", {"nothing": 1}, 400, "nothing"),
    "type": ("chat", {"max_tokens": "5"}, 400, "max_tokens"),
    "no messages": ("chat", {"messages": []}, 400, "messages"),
    "no template": ("chat", {"model": "letters"}, 400, "messages"),
    "role": ("chat", {"messages": [{"role": "judge", "content": "a"}]}, 400, "messages.0.role"),
    "image": ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, None),
    "no text": ("chat", {"messages": [{"role": "user"}]}, 400, "messages.content"),
    "tools": ("chat", {"tools": [{"type": "function"}]}, 400, "tools.0.function"),
    "tool": ("chat", {"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
    "choice": (
        "chat",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        400,
        "tool_choice",
    ),
    "choice without tools": ("chat", {"tool_choice": "required"}, 400, "tools"),
    "two tools": ("chat", {"tools": TOOLS * 2}, 400, "tools"),
    "wrong parameters": ("chat", {"tools": [tool({"type": "nothing"})]}, 400, "tools"),
    "tools and logprobs": ("chat", {"tools": TOOLS, "logprobs": True}, 400, "logprobs"),
    "wrong call": (
        "chat",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "["}}],
                }
            ]
        },
        400,
        "messages.tool_calls.function.arguments",
    ),
    "format": ("chat", {"response_format": {"type": "xml"}}, 400, "response_format"),
    "schema": (
        "chat",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"if": {}, "then": {"required": ["a"]}}},
            }
        },
        400,
        "response_format",
    ),
    "regex": ("complete", {"regex": "(a"}, 400, "regex"),
    "grammar": ("complete", {"grammar": "start: nothing"}, 400, "grammar"),
    "two descriptions": ("complete", {"grammar": 'start: "a"', "regex": "a"}, 400, "regex"),
    "regex past the end": ("complete", {"regex": "a", "ignore_eos": True}, 400, "ignore_eos"),
    "regex and scores": ("complete", {"regex": "a", "echo": True, "logprobs": 1}, 400, "grammar"),
    "effort": ("chat", {"reasoning_effort": "low"}, 400, "reasoning_effort"),
    "store": ("chat", {"store": True}, 400, "store"),
    "long prompt": ("chat", {"messages": [{"role": "user", "content": "a" * 1100}]}, 400, "messages"),
    "top without logprobs": ("chat", {"top_logprobs": 2}, 400, "top_logprobs"),
    "two lengths": ("chat", {"max_tokens": 2, "max_completion_tokens": 3}, 400, "max_completion_tokens"),
    "temperature": ("chat", {"temperature": 3}, 400, "temperature"),
    "n": ("chat", {"n": 1000}, 400, "n"),
    "equal texts": ("chat", {"n": 2, "temperature": 0}, 400, "temperature"),
    "bias": ("chat", {"logit_bias": {"a": 1}}, 400, None),
    "bias outside": ("chat", {"logit_bias": {"999999": 1}}, 400, "logit_bias"),
    "stream options": ("chat", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "empty stop": ("complete", {"stop": ""}, 400, None),
    "foreign character": ("complete", {"prompt": "é"}, 400, "alphabet"),
    "empty prompt": ("complete", {"prompt": ""}, 400, "prompt"),
    "token outside": ("complete", {"prompt": [999]}, 400, "prompt"),
    "negative token": ("complete", {"prompt": [-1]}, 400, None),
    "long completion": ("complete", {"prompt": "a" * 256}, 400, "prompt"),
    "suffix": ("complete", {"suffix": "end"}, 400, "suffix"),
    "best_of": ("complete", {"best_of": 3}, 400, "best_of"),
    "no new tokens": ("complete", {"max_tokens": 0}, 400, "max_tokens"),
    "many texts": ("complete", {"prompt": ["a"] * 20, "n": 20}, 400, "n"),
    "dimensions": ("embed", {"dimensions": 3}, 400, "dimensions"),
    "long input": ("embed", {"input": "a" * 65}, 400, "input"),
    "input outside": ("embed", {"input": [999]}, 400, "input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_request_is_refused(client: Any, case: str) -> None:
    kind, body, status, param = REFUSED[case]
    route, usual = {
        "chat": ("/v1/chat/completions", {"model": "talker", "messages": HELLO, "max_tokens": 2}),
        "complete": ("/v1/completions", {"model": "letters", "prompt": "once", "max_tokens": 2}),
        "embed": ("/v1/embeddings", {"model": "encoder", "input": "a"}),
    }[kind]
    response = client.post(route, json={**usual, **body})
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert set(error) == {"message", "type", "param", "code"} and error["code"] and "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param, error


def test_long_prompt_has_the_code_of_openai(client: Any) -> None:
    error = complete(client, prompt="a" * 256).json()["error"]
    assert error["code"] == "context_length_exceeded" and "256" in error["message"]
