"""Programs of others ask the server as their documentation shows."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import glassformer as gf
from glassformer.loaded import Loaded
from glassformer.serving.computing import Served
from glassformer.text import BPETokenizer
from tests.serving.conftest import listening_to

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


@pytest.fixture(scope="module")
def scored_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model of words that has an opinion on each of them."""
    test_lm_eval = pytest.importorskip("tests.laboratory.test_lm_eval", reason="pip install lm-eval")
    folder = tmp_path_factory.mktemp("scored")
    text = BPETokenizer.train([test_lm_eval.TEXT * 30], 280)
    test_lm_eval.saved(folder, "llama@1m+gqa:1", text)
    return str(folder)


def test_lm_eval_scores_of_a_task_equal_those_of_the_process(
    scored_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty questions with three choices: each log-likelihood to 1e-4, and the scores, of `local-completions` and of
    lm-eval's own `hf`."""
    pytest.importorskip("aiohttp", reason="pip install 'lm-eval[api]'")
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="pip install 'lm-eval[api]'")
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    from tests.laboratory.test_lm_eval import TASK, WORDS

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    words = WORDS * 8
    rows = [{"question": " ".join(words[i : i + 2 + i % 5]), "label": i % 3,
             "choices": [" " + " ".join(words[i + 7 * j : i + 7 * j + 1 + j]) for j in (1, 2, 3)]}
            for i in range(40)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "choice.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    loaded = gf.load(scored_folder)

    def evaluated(kind: str, **arguments: Any) -> Any:
        return evaluator.simple_evaluate(
            model=kind, model_args=arguments, tasks=["choice"], log_samples=True, bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        )  # fmt: skip

    with listening_to([Served("scored", loaded, slots=2)]) as address:
        base = f"{address}/v1/completions"
        found = evaluated("local-completions", model="scored", base_url=base, tokenizer=scored_folder,
                          tokenizer_backend="huggingface", num_concurrent=2, batch_size=4, max_length=40)  # fmt: skip
    expected = evaluated("hf", pretrained=scored_folder, device="cpu")
    scores, theirs = ({key: value for key, value in one["results"]["choice"].items() if "acc" in key}
                      for one in (found, expected))  # fmt: skip
    assert scores == theirs and len(found["samples"]["choice"]) == 40
    by_document = [sorted(one["samples"]["choice"], key=lambda sample: sample["doc_id"]) for one in (found, expected)]
    for mine, other in zip(*by_document, strict=True):
        for (logprob, greedy), (their_logprob, their_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(logprob) == pytest.approx(float(their_logprob), abs=1e-4)
            assert str(greedy) == str(their_greedy)


@pytest.fixture(scope="module")
def brief_live(brief: Loaded) -> Iterator[str]:
    """Address of a server whose model answers in two words."""
    with listening_to([Served("brief", brief)]) as address:
        yield address


@pytest.mark.parametrize("form", ["openai-chat", "open-responses"])
def test_llm_comply(brief_live: str, form: str) -> None:
    """Only the image is refused, which no model here reads."""
    if importlib.util.find_spec("llm_comply") is None:
        pytest.skip("pip install llm-comply")
    run = subprocess.run(
        [sys.executable, "-m", "llm_comply.cli", "-u", f"{brief_live}/v1", "-k", "none", "-m", "brief", "--format",
         form, "--json"], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    results = {one["id"]: one for one in json.loads(run.stdout)["results"]}
    failed = {name for name, one in results.items() if one["status"] == "failed"}
    assert failed == {name for name in results if "image" in name}, run.stdout
    passed = [name for name, one in results.items() if one["status"] == "passed"]
    assert len(passed) >= {"openai-chat": 7, "open-responses": 10}[form], run.stdout


@pytest.mark.parametrize("profile", ["chat", "modern"])
def test_compatcanary(brief_live: str, profile: str, tmp_path: Path) -> None:
    program = shutil.which("compatcanary")
    if program is None:
        pytest.skip("npm install -g compatcanary")
    report = tmp_path / "report.json"
    run = subprocess.run(
        [program, "scan", "--base-url", f"{brief_live}/v1", "--model", "brief", "--profile", profile, "--api-key",
         "none", "--format", "json", "--output", str(report), "--timeout", "120"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(report.read_text())["score"] == 100, report.read_text()


STREAMS = [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_guidellm(brief_live: str, tmp_path: Path) -> None:
    program = shutil.which("guidellm")
    if program is None:
        pytest.skip("pip install guidellm")
    rows = [{"prompt": f"{i} and two and three", "output_tokens_count": 12} for i in range(256)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={brief_live},model=brief,request_format=/v1/completions"
    subprocess.run(
        [program, "run", "--backend", backend, "--profile", "kind=concurrent,streams=1",
         "--override", "profile.streams", ",".join(map(str, STREAMS)),
         "--constraint", "kind=max_requests,count=32", "--data", f"kind=json_file,path={tmp_path / 'rows.jsonl'}",
         "--output", f"kind=json,path={report}", "--disable-console"],
        check=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"},  # of ten that each load torch
    )  # fmt: skip
    found = json.loads(report.read_text())["benchmarks"]
    assert len(found) == len(STREAMS)
    for one in found:
        totals = one["metrics"]["request_totals"]
        assert totals["errored"] == 0 and totals["successful"] >= 32, totals
        tokens = one["metrics"]["output_token_count"]["successful"]
        assert tokens["min"] == tokens["max"] == 12
