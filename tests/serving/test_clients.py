"""Programs of others ask the server as their documentation shows."""

from __future__ import annotations

import pytest

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
