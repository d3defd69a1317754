"""Programs of others ask the server as their documentation shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from glassformer.loaded import Loaded

openai = pytest.importorskip("openai", reason="pip install openai")


@pytest.fixture
def client(live: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)


def test_openai_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asked = {"model": "talker", "messages": messages, "max_tokens": 6, "temperature": 1, "seed": 1}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = found.choices[0]
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == choice.message.content
    assert chunks[-1].usage == found.usage


def test_openai_completions_embeddings_and_models(client: openai.OpenAI) -> None:
    found = client.completions.create(model="letters", prompt=["once", "upon"], max_tokens=4, temperature=0)
    assert [one.index for one in found.choices] == [0, 1]
    vectors = client.embeddings.create(model="encoder", input=["a", "b"])  # base64 by default
    assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 32
    assert {one.id for one in client.models.list()} == {"letters", "talker", "encoder"}
    assert client.models.retrieve("letters").id == "letters"


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nothing", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="letters", prompt="a" * 300)
    assert long.value.code == "context_length_exceeded" and long.value.param == "prompt"


HELLO = [{"role": "user", "content": "Hello"}]
LIMIT = {"max_tokens": 120, "temperature": 1.0}


def answer_model() -> Any:
    """Class of answers that bodies of JSON schemas are made of."""
    from pydantic import BaseModel, ConfigDict, Field

    class Answer(BaseModel):
        """Answer to a question."""

        model_config = ConfigDict(extra="forbid")

        colour: Literal["red", "blue"]
        count: int = Field(ge=0, le=99)

    return Answer


def test_openai_parse_tools_and_responses(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    answer = answer_model()
    parsed = client.chat.completions.parse(model="talker", messages=HELLO, response_format=answer, **LIMIT)
    assert isinstance(parsed.choices[0].message.parsed, answer)
    tools = [openai.pydantic_function_tool(answer)]
    choice = {"type": "function", "function": {"name": "Answer"}}
    called = client.chat.completions.parse(model="talker", messages=HELLO, tools=tools, tool_choice=choice, **LIMIT)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, answer)
    plain = client.responses.create(model="talker", input="Hello", max_output_tokens=5)
    assert plain.output_text and plain.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="talker", input="Hello", text_format=answer, max_output_tokens=120) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, answer) and "response.output_text.delta" in kinds
    structured = client.responses.parse(model="talker", input="Hello", text_format=answer, max_output_tokens=120)
    assert isinstance(structured.output_parsed, answer)


def test_anthropic(live: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(base_url=live, api_key="none", max_retries=0)
    asked = {"model": "talker", "messages": HELLO, "max_tokens": 6}
    found = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == found.content[0].text
        assert stream.get_final_message().usage == found.usage
    assert client.messages.count_tokens(model="talker", messages=HELLO).input_tokens == found.usage.input_tokens
    schema = answer_model().model_json_schema()
    tools = [{"name": "answer", "description": "Answers.", "input_schema": schema}]
    called = client.messages.create(
        model="talker", messages=HELLO, tools=tools, tool_choice={"type": "tool", "name": "answer"}, max_tokens=120
    )
    assert called.stop_reason == "tool_use" and called.content[0].input["colour"] in ("red", "blue")
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(model="talker", messages=[{"role": "user", "content": "a" * 1100}], max_tokens=1)
    assert long.value.body["error"]["type"] == "invalid_request_error"


def test_llm(live: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    llm = pytest.importorskip("llm", reason="pip install llm")
    entry = {"model_id": "gf", "model_name": "talker", "api_base": f"{live}/v1", "api_key": "none",
             "supports_schema": True}  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    model = llm.get_model("gf")
    assert len(model.prompt("Hello", max_tokens=6, key="none").text()) > 0
    found = model.prompt("Hello", schema=answer_model(), max_tokens=120, key="none").text()
    answer_model().model_validate_json(found)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(live: str, method: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    model = langchain.ChatOpenAI(base_url=f"{live}/v1", api_key="none", model="talker", max_tokens=120, max_retries=0)
    answer = answer_model()
    assert isinstance(model.with_structured_output(answer, method=method).invoke("Hello"), answer)
    if method == "json_schema":
        assert "".join(chunk.content for chunk in model.stream("Hello"))
        kind = langchain.OpenAIEmbeddings
        vectors = kind(base_url=f"{live}/v1", api_key="none", model="encoder", check_embedding_ctx_length=False)
        assert len(vectors.embed_query("a")) == 32
        text = langchain.OpenAI(base_url=f"{live}/v1", api_key="none", model="letters", max_tokens=4)
        assert len(text.invoke("once")) == 4


def any_object() -> Any:
    """Class of answers that any JSON object is one of, as json_object promises no more."""
    from pydantic import BaseModel, ConfigDict

    class AnyObject(BaseModel):
        """Any object."""

        model_config = ConfigDict(extra="allow")

    return AnyObject


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(live: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="pip install instructor")
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0), mode=getattr(instructor.Mode, mode)
    )
    kind, closing = (any_object(), {"125": 100.0}) if mode == "JSON" else (answer_model(), None)  # of }
    found = client.chat.completions.create(
        model="talker", messages=HELLO, response_model=kind, max_retries=0, logit_bias=closing, **LIMIT
    )
    assert isinstance(found, kind) and (mode == "JSON" or found.colour in ("red", "blue"))


def test_litellm(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    asked = {"api_base": f"{live}/v1", "api_key": "none", "max_tokens": 6, "num_retries": 0}
    found = litellm.completion(model="openai/talker", messages=HELLO, **asked)
    stream = litellm.completion(model="hosted_vllm/talker", messages=HELLO, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == found.choices[0].message.content
    assert len(litellm.text_completion(model="text-completion-openai/letters", prompt="once", **asked).choices) == 1


def test_lm_eval_scores_equal_those_of_the_model(live: str, letters: Loaded) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="pip install lm-eval")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    client = models.LocalCompletionsAPI(model="letters", base_url=f"{live}/v1/completions", tokenizer_backend=None)
    client.tokenizer, client.tokenized_requests = letters.tokenizer, True  # the requests below are token ids
    ids = letters.tokenizer.encode("once upon").tolist()  # type: ignore[union-attr]
    found = client._loglikelihood_tokens([(("once ", "upon"), ids[:5], ids[5:])])
    with torch.inference_mode():
        log_p = letters.model(torch.tensor([ids]))[0].log_softmax(-1)
    expected = sum(float(log_p[i - 1, ids[i]]) for i in range(5, 9))
    assert instance and found[0][0] == pytest.approx(expected, abs=1e-4)
