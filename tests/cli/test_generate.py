"""glassformer generate: what it prints is what the model says."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer import machine
from glassformer.cli import app, main
from glassformer.errors import RequestError
from glassformer.generation.beams import beams
from glassformer.model import Model
from glassformer.parts.precision import onednn_in_bf16
from glassformer.text import ByteTokenizer, CharTokenizer
from tests import elsewhere

BYTES = ByteTokenizer()
PROMPT = "Once upon a time"
Said = pytest.CaptureFixture[str]


def greedy(folder: str, prompt: str, new: int) -> list[int]:
    """Returns the greedy ids, with a pass over the whole text for each token."""
    loaded, tokens = gf.load(folder), torch.tensor([BYTES.encode(prompt).tolist()])
    for _ in range(new):
        with torch.no_grad():
            tokens = torch.cat([tokens, loaded.model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens[0, -new:].tolist()


def run(capsys: Said, *arguments: str, status: int = 0) -> tuple[str, str]:
    assert main(["generate", *arguments, "--threads", "1"]) == status
    said = capsys.readouterr()
    return said.out, said.err


def made(capsys: Said, *arguments: str, status: int = 0) -> dict[str, Any]:
    return flat(run(capsys, *arguments, "--json", status=status)[0])


def flat(document: str) -> dict[str, Any]:
    """Returns the parsed document; for a single text, with the fields of the text at the top too."""
    found: dict[str, Any] = json.loads(document)
    return {**found["texts"][0], **found} if len(found["texts"]) == 1 else found


def test_greedy_text_and_its_summary_line(model: str, capsys: Said):
    out, err = run(capsys, model, "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20", "--ignore-eos")
    assert out == PROMPT + BYTES.decode(greedy(model, PROMPT, 20)) + "\n"
    assert (
        err.startswith("16 tokens read, the first word after ") and "20 written, " in err and "tokens/s; state" in err
    )
    assert len(err.splitlines()) == 1


def test_json_has_one_shape(model: str, capsys: Said):
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20", "--ignore-eos", "--json"]
    found, both = (json.loads(run(capsys, model, *more, *options)[0]) for more in ([], [PROMPT]))
    assert found.keys() == both.keys() and both["texts"] == 2 * found["texts"]
    text = {"prompt": PROMPT, "text": BYTES.decode(greedy(model, PROMPT, 20)), "tokens": 20, "finish": "length"}
    assert found["texts"] == [text]
    assert found["tokens_per_second"] > 0 and found["seconds_to_first_token"] > 0
    assert found["state_bytes"] == gf.load(model).config.state_bytes(36, torch.float32)


def test_prompts_from_json_lines_give_json_lines(model: str, capsys: Said, tmp_path: Path):
    """Each line keeps its other fields, and is what its prompt gives by itself, in the order of the file."""
    options = ["--max-new-tokens", "5", "--temperature", "0", "--ignore-eos"]
    rows: list[Any] = [{"id": 7, "prompt": PROMPT}, "a", {"prompt": "The quick brown fox", "text": "old"}] * 7
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    out, err = run(capsys, model, "--prompts", str(tmp_path / "in.jsonl"), *options)
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == len(rows) and len(err.splitlines()) == 1
    for row, line in zip(rows[:3] * 7, lines, strict=True):
        prompt = row if isinstance(row, str) else row["prompt"]
        given = {"prompt": row} if isinstance(row, str) else row
        text = BYTES.decode(greedy(model, prompt, 5))
        assert line == {**given, "prompt": prompt, "text": text, "tokens": 5, "finish": "length"}


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ('{"prompt": "a"}\n{"prompt"', "syntax", "prompts:2"),
        ('{"text": "a"}', "missing", "prompts:1.prompt"),
        ("[1]", "missing", "prompts:1.prompt"),
        ('""', "missing", "prompts:1.prompt"),
        ("\n", "missing", "prompts"),
    ],
)
def test_invalid_prompts_files_are_refused(text: str, code: str, field: str, model: str, capsys: Said, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(text)
    error = json.loads(run(capsys, model, "--prompts", str(tmp_path / "in.jsonl"), "--json", status=2)[0])["error"]
    assert (error["code"], error["field"]) == (code, field)
    assert run(capsys, model, "Hi", "--prompts", str(tmp_path / "in.jsonl"), status=2)[0] == ""


def test_several_prompts_generate_as_separate_ones(model: str, capsys: Said):
    prompts = [PROMPT, "a", "The quick brown fox jumps"]
    options = ["--seed", "3", "--max-new-tokens", "12", "--temperature", "1.5", "--ignore-eos"]
    given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    found = made(capsys, model, *given, *options)
    assert "text" not in found
    for prompt, one in zip(prompts, found["texts"], strict=True):
        alone = made(capsys, model, "--prompt", prompt, *options)
        assert one == alone["texts"][0]
    out, err = run(capsys, model, *given, *options)
    for i, one in enumerate(found["texts"]):
        assert f"--- {i + 1} of 3: {one['prompt']!r}\n{one['prompt']}{one['text']}\n" in out
    assert "42 tokens read" in err and "36 written" in err


def test_samples_differ_and_come_again(model: str, capsys: Said):
    options = ["--prompt", PROMPT, "--n", "4", "--max-new-tokens", "10", "--temperature", "2"]
    first = made(capsys, model, *options, "--seed", "1")
    assert len({one["text"] for one in first["texts"]}) == 4
    assert made(capsys, model, *options, "--seed", "1")["texts"] == first["texts"]
    assert made(capsys, model, *options, "--seed", "2")["texts"] != first["texts"]
    assert made(capsys, model, *options)["texts"] != made(capsys, model, *options)["texts"]


def test_it_ends_before_a_stop_string_and_at_the_end_of_text(model: str, capsys: Said):
    free = BYTES.decode(greedy(model, PROMPT, 30))
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "30"]
    stop = free[7:10]
    out, _ = run(capsys, model, *options, "--stop", "never to be seen", "--stop", stop)
    assert out == PROMPT + free[: free.index(stop)] + "\n"
    assert made(capsys, model, *options, "--stop", stop)["finish"] == "stop"
    with pytest.MonkeyPatch.context() as patch:
        loaded = dataclasses.replace(gf.load(model), ends=(greedy(model, PROMPT, 5)[-1],))
        patch.setattr(import_module("glassformer.naming.chatting"), "load", lambda *_, **__: loaded)
        found = made(capsys, model, *options)
        assert found["finish"] == "stop" and found["text"] == BYTES.decode(greedy(model, PROMPT, found["tokens"]))
        assert found["tokens"] < 5
        assert made(capsys, model, *options, "--ignore-eos")["tokens"] == 30


@pytest.mark.parametrize("more", [[], ["--repetition-penalty", "1.5"], ["--n", "2"]], ids=str)
def test_a_kept_prompt_is_read_once(model: str, tmp_path: Path, capsys: Said, read: list[int], more: list[str]):
    options = ["--temperature", "0.5", "--seed", "1", "--max-new-tokens", "9", *more]
    kept = ["--state", str(tmp_path / "kept")]
    longer = PROMPT + ", when wishes"
    plain = [made(capsys, model, "--prompt", prompt, *options)["texts"] for prompt in (PROMPT, longer)]
    for prompt, text, passes in ((PROMPT, plain[0], [15, 1]), (PROMPT, plain[0], [1]), (longer, plain[1], [14])):
        read.clear()
        assert made(capsys, model, "--prompt", prompt, *options, *kept)["texts"] == text
        assert read[: len(passes)] == passes and set(read[len(passes) :]) == {1}
    assert len(list(tmp_path.iterdir())) == 1


def test_another_prompt_is_kept_instead_and_another_model_refuses(model: str, draft: str, tmp_path: Path, capsys: Said):
    options = ["--temperature", "0", "--max-new-tokens", "5", "--state", str(tmp_path / "kept")]
    run(capsys, model, "--prompt", PROMPT, *options)
    before = (tmp_path / "kept").read_bytes()
    _, err = run(capsys, model, "--prompt", "Twice", *options)
    assert "written again" in err and (tmp_path / "kept").read_bytes() != before
    out, err = run(capsys, draft, "--prompt", "Twice", *options, status=2)
    assert "another model" in err and out == ""
    run(capsys, model, "--prompt", "a", "--state", str(tmp_path / "single"), "--max-new-tokens", "1")
    assert not (tmp_path / "single").exists()  # a single token is not worth it
    (tmp_path / "kept").write_bytes(b"nonsense")
    assert "not a state" in run(capsys, model, "--prompt", "Twice", *options, status=2)[1]


def test_window_model_continues_from_a_kept_prompt(windowed: str, tmp_path: Path, capsys: Said):
    options = ["--prompt", "Once upon a time there was", "--temperature", "0", "--max-new-tokens", "30"]
    plain = made(capsys, windowed, *options)["text"]
    for _ in range(2):
        assert made(capsys, windowed, *options, "--state", str(tmp_path / "kept"))["text"] == plain


def test_guesses_change_nothing_but_the_passes(model: str, draft: str, capsys: Said):
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "40", "--ignore-eos"]
    plain = made(capsys, model, *options)["text"]
    for way in (["--speculate"], ["--draft", draft], ["--draft", model]):
        found = made(capsys, model, *options, *way)
        assert found["text"] == plain
    assert found["guesses"]["accepted"] == found["guesses"]["proposed"] > 20 > found["guesses"]["passes"]
    assert "100% of " in run(capsys, model, *options, "--draft", model)[1]


def test_a_draft_of_another_vocabulary_is_refused(model: str, tmp_path: Path, capsys: Said):
    from tests.cli.conftest import saved

    other = saved(tmp_path / "other", "llama+vocab_size=300")
    out, err = run(capsys, model, "--prompt", PROMPT, "--draft", other, status=2)
    assert "vocabulary of 300 and the model one of 257" in err and out == ""


def test_a_draft_whose_tokens_are_others_is_refused(model: str, tmp_path: Path, capsys: Said):
    """The vocabularies have the same size, so that a check of ids would pass."""
    chars = CharTokenizer([chr(0x4E00 + i) for i in range(256)], unknown=True)
    assert chars.vocab_size == BYTES.vocab_size
    gf.save(gf.load(model).model, chars, tmp_path / "other")
    out, err = run(capsys, model, "--prompt", PROMPT, "--draft", str(tmp_path / "other"), status=2)
    assert "in the model; give a draft of the same vocabulary" in err and out == "" and len(err.splitlines()) == 1


def test_a_draft_whose_tokenizer_is_only_written_otherwise_is_taken(talker: str, model: str, capsys: Said):
    found = made(capsys, model, "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20", "--draft", talker)
    assert found["guesses"]["accepted"] > 0


def test_beams(model: str, capsys: Said):
    options = ["--prompt", PROMPT, "--beams", "3", "--max-new-tokens", "8"]
    best = beams(gf.load(model).model, torch.tensor([BYTES.encode(PROMPT).tolist()]), 3, 8, (256,), n=2)
    found = made(capsys, model, *options, "--n", "2")["texts"]
    assert [one["text"] for one in found] == [BYTES.decode([t for t in one.tokens if t != 256]) for one in best]
    assert [one["score"] for one in found] == pytest.approx([one.score for one in best])
    assert run(capsys, model, *options)[0] == PROMPT + found[0]["text"] + "\n"


def test_logprobs_are_the_models_own(model: str, capsys: Said):
    found = made(capsys, model, "--prompt", PROMPT, "--logprobs", "3", "--seed", "1", "--max-new-tokens", "6",
                 "--temperature", "2", "--ignore-eos")  # fmt: skip
    ids = [one["id"] for one in found["logprobs"]]
    assert BYTES.decode(ids) == found["text"] and found["logprobs"][0]["token"] == BYTES.decode(ids[:1])
    with torch.no_grad():
        logits = gf.load(model).model(torch.tensor([[*BYTES.encode(PROMPT).tolist(), *ids]]))[0, 15:-1]
    for row, one in zip(logits.log_softmax(-1), found["logprobs"], strict=True):
        assert one["logprob"] == pytest.approx(float(row[one["id"]]), abs=1e-4)
        assert [top["id"] for top in one["top"]] == row.topk(3).indices.tolist()
        assert [top["logprob"] for top in one["top"]] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_weights(model: str, kind: str, capsys: Said):
    """In 16 bits beside: the state is half as large."""
    found = made(capsys, model, "--prompt", PROMPT, "--quantize", kind, "--max-new-tokens", "4")
    assert found["tokens"] and found["state_bytes"] == gf.load(model).config.state_bytes(20, torch.bfloat16)
    wide = made(capsys, model, "--prompt", PROMPT, "--quantize", kind, "--max-new-tokens", "4", "--dtype", "float32")
    assert wide["state_bytes"] == 2 * found["state_bytes"]


def test_learned_positions_end(learned: str, capsys: Said):
    assert made(capsys, learned, "--prompt", PROMPT, "--ignore-eos")["tokens"] == 24  # all positions are used
    _, err = run(capsys, learned, "--prompt", PROMPT, "--max-new-tokens", "25", status=2)
    assert "max_new_tokens=25 after a prompt of 16 go past this model's learned positions, which end at 40" in err
    assert "the prompt has 40 tokens" in run(capsys, learned, "--prompt", "a" * 40, status=2)[1]


def test_a_prompt_longer_than_the_context(model: str, capsys: Said):
    out, err = run(capsys, model, "--prompt", "a" * 300, status=2)
    assert "the prompt has 300 tokens, and this model reads 256; add +context=TOKENS" in err and out == ""
    assert made(capsys, f"{model}+context=512", "--prompt", "a" * 300, "--max-new-tokens", "3")["tokens"] <= 3


def test_prompts_from_files_and_standard_input(
    model: str, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    text = "Grüße, 日本 🙂\n"
    (tmp_path / "text").write_text(text, encoding="utf-8")
    options = ["--temperature", "0", "--max-new-tokens", "3"]
    named = made(capsys, model, "--prompt-file", str(tmp_path / "text"), *options)
    assert named["prompt"] == text
    for way in (["--prompt-file", "-"], ["--prompt", "-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert made(capsys, model, *way, *options)["texts"] == named["texts"]
    both = made(capsys, model, "--prompt-file", str(tmp_path / "text"), "--prompt", "- a list", *options)
    assert [one["prompt"] for one in both["texts"]] == ["- a list", text]
    (tmp_path / "text").write_bytes(b"a\xff")
    assert (
        "is not UTF-8 text: it holds the byte 0xff"
        in run(capsys, model, "--prompt-file", str(tmp_path / "text"), status=2)[1]
    )


def test_the_ends_of_lines_are_as_the_file_has_them(
    model: str, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "text").write_bytes(b"one\r\ntwo\rthree\n")
    found = made(capsys, model, "--prompt-file", str(tmp_path / "text"), "--max-new-tokens", "1")
    assert found["prompt"] == "one\r\ntwo\rthree\n"


def test_a_state_that_does_not_fit_is_refused_before_it_is_made(
    model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    """One that just fits is made."""
    bound, made_of = 100_000, gf.load(model).model.init_state(1, 26).nbytes
    monkeypatch.setattr(machine, "free_memory", lambda device: bound)
    whole = Model.init_state

    def small(self: Model, *given: Any, **more: Any) -> Any:
        state = whole(self, *given, **more)
        assert more.get("device") == "meta" or state.nbytes <= bound
        return state

    monkeypatch.setattr(Model, "init_state", small)
    for more in (["--max-new-tokens", "100000"], ["--max-new-tokens", "60", "--n", "1000"],
                 ["--max-new-tokens", "60", "--beams", "40"]):  # fmt: skip
        out, err = run(capsys, f"{model}+context=200000", "--prompt", PROMPT, *more, status=2)
        assert out == "" and "100 kB of memory free; lower max_new_tokens, n or beams" in err, err
    bound = made_of
    assert made(capsys, model, "--prompt", PROMPT, "--max-new-tokens", "10")["state_bytes"] == made_of
    assert "of memory free" in run(capsys, model, "--prompt", PROMPT, "--max-new-tokens", "11", status=2)[1]


def test_a_state_may_be_narrower_than_the_weights(model: str, tmp_path: Path, capsys: Said, draft: str):
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "10", "--ignore-eos"]
    loaded, tokens = gf.load(model), torch.tensor([BYTES.encode(PROMPT).tolist()])
    kept = ["--state", str(tmp_path / "kept")]
    for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8)):
        wanted = gf.generate(loaded.model, tokens, 10, state=loaded.model.init_state(1, 26, dtype))[0, 16:].tolist()
        for way in ([], ["--logprobs", "1"], ["--speculate"], ["--draft", draft]):
            found = made(capsys, model, *options, "--state-dtype", kind, *way)
            assert found["text"] == BYTES.decode(wanted)
            if way != ["--speculate"]:
                assert found["state_bytes"] == loaded.model.init_state(1, 26, dtype).nbytes
    best = beams(loaded.model, tokens, 3, 8, (256,), dtype=torch.int8)[0]
    found = made(capsys, model, "--prompt", PROMPT, "--beams", "3", "--max-new-tokens", "8", "--state-dtype", "int8")
    assert found["score"] == pytest.approx(best.score)
    assert found["state_bytes"] == loaded.model.init_state(3, 24, torch.int8).nbytes
    for _ in range(2):
        assert made(capsys, model, *options, "--state-dtype", "int8", *kept)["text"] == BYTES.decode(wanted)
    assert "was kept in torch.int8" in run(capsys, model, *options, "--state-dtype", "bfloat16", *kept, status=2)[1]


def test_a_bias_on_tokens(model: str, capsys: Said):
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "8", "--ignore-eos"]
    first, second = greedy(model, PROMPT, 2)
    tokens = torch.tensor([BYTES.encode(PROMPT).tolist()])
    bias = {first: -100.0, second: -100.0, ord("q"): 2.5}
    wanted = gf.generate(gf.load(model).model, tokens, 8, logit_bias=bias)[0, 16:].tolist()
    given = [word for token, value in bias.items() for word in ("--logit-bias", f"{token}={value}")]
    assert made(capsys, model, *options, *given)["text"] == BYTES.decode(wanted)
    assert made(capsys, model, *options, "--logit-bias", f"{ord('q')}=100")["text"] == "q" * 8
    for way in ([], ["--n", "2"], ["--speculate"]):
        asked = ["--prompt", PROMPT, "--logit-bias", "257=1", *way]
        out, err = run(capsys, model, *asked, status=2)
        assert "logit_bias has the token 257; this vocabulary of 257 ends before it" in err and out == ""


def test_far_too_long_prompt_is_refused_after_reading_its_start(
    model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    lengths: list[int] = []
    encode = ByteTokenizer.encode

    def noted(self: ByteTokenizer, text: str) -> Any:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    out, err = run(capsys, model, "--prompt", "a" * 5_000_000, status=2)
    assert "the prompt has over 8,192 tokens, and this model reads 256; add +context=TOKENS" in err and out == ""
    assert lengths == [64 * 256]


WRONG = [
    (["--logit-bias", "3"], "logit_bias='3': write ID=VALUE, such as 42=-100"),
    (["--logit-bias", "a=3"], "logit_bias='a=3': write"),
    (["--logit-bias", "3=nan"], "nan"),
    (["--logit-bias", "3=101"], "101"),
    (["--logit-bias", "3=1", "--beams", "2"], "beams search for the most likely text"),
    (["--state-dtype", "int4"], "int4"),
    (["--top-p", "0"], "top_p=0.0"),
    (["--temperature", "-1"], "temperature=-1.0"),
    (["--temperature", "nan"], "temperature=nan"),
    (["--min-p", "2"], "min_p=2.0"),
    (["--top-k", "0"], "top_k=0"),
    (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
    (["--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
    (["--max-new-tokens", "1" + "0" * 30], "max_new_tokens must be at most 1,000,000, got 1000"),
    (["--n", "0"], "n=0"),
    (["--n", "2", "--temperature", "0"], "n=2 texts at temperature=0"),
    (["--beams", "0"], "beams=0"),
    (["--beams", "3", "--n", "4"], "n=4 is more than beams=3"),
    (["--beams", "3", "--top-p", "0.9"], "beams search for the most likely text"),
    (["--beams", "3", "--speculate"], "beams does not go with speculate"),
    (["--speculate", "--draft", "MODEL"], "speculate does not go with draft"),
    (["--draft", "MODEL", "--state", "x"], "draft does not go with state"),
    (["--speculate", "--prompt", "y"], "speculate does not go with several prompts"),
    (["--logprobs", "2"], "--logprobs are printed with --json"),
    (["--threads", "0"], "threads=0"),
    (["--stop", ""], "stop[0]=''"),
    (["--state", "/nowhere/at/all"], "/nowhere/at does not exist"),
    (["--prompt", "y", "--state", "x"], "state keeps one prompt"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "a\udcff"], "lone surrogate U+DCFF"),
    (["--prompt", "y" * 10_000_001], "more than 10,000,000 characters"),
    (["--prompt-file", "/nowhere/at/all"], "named /nowhere/at/all"),
    (["--prompt-file", "/"], "'/' cannot be read"),
    (["--quantize", "int3"], "int3"),
    ([word for i in range(10_001) for word in ("--stop", str(i))], "the command has 20,006 words"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_wrong_request_does_not_wait_for_the_model(
    model: str, arguments: list[str], says: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(import_module("glassformer.naming.chatting"), "load", load)
    monkeypatch.setattr(machine, "apply", lambda chosen: None)
    given = [model if one == "MODEL" else one for one in arguments]
    assert main(["generate", model, "--prompt", "x", *given]) == 2
    said = capsys.readouterr()
    assert says in said.err and len(said.err.splitlines()) == 1 and said.out == ""


def test_nan_logits_fail_only_one_prompt(model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch):
    """The others' texts are unharmed."""
    loaded = gf.load(model)
    with torch.no_grad():
        loaded.model.embedding.weight[ord("y")] = float("nan")
        loaded.model.head.weight = torch.nn.Parameter(loaded.model.embedding.weight.nan_to_num())
    monkeypatch.setattr(import_module("glassformer.naming.chatting"), "load", lambda *_, **__: loaded)
    monkeypatch.setattr(type(loaded.model.head), "forward", lambda self, x, *_, **__: x @ self.weight.T)
    options = ["--temperature", "0", "--max-new-tokens", "5", "--ignore-eos"]
    assert "not numbers after 2 tokens" in run(capsys, model, "--prompt", "xy", *options, status=1)[1]
    both = ["--prompt", "xy", "--prompt", "xz", *options]
    one = made(capsys, model, "--prompt", "xy", *options, status=1)
    assert (one["finish"], one["tokens"], one["seconds_to_first_token"]) == ("failed", 0, None)
    assert "not numbers after 2 tokens" in one["error"]
    searched = made(capsys, model, "--prompt", "xy", "--beams", "2", "--max-new-tokens", "5", status=1)
    assert searched["finish"] == "failed" and "not numbers after 2 tokens" in searched["error"]
    found = made(capsys, model, *both, status=1)["texts"]
    assert [one["finish"] for one in found] == ["failed", "length"] and "not numbers" in found[0]["error"]
    out, err = run(capsys, model, *both, status=1)
    assert f"xz{found[1]['text']}\n" in out and "not numbers" in err


def test_characters_that_cannot_be_printed_are_replaced(model: str):
    command = [sys.executable, "-m", "glassformer", "generate", model, "--prompt", "日", "--max-new-tokens", "2"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0 and done.stdout.startswith(b"?") and b"tokens/s" in done.stderr


SLOW = pytest.mark.slow
BEGUN = """
import sys
from glassformer.__main__ import entry
from glassformer.generation.texts import TextRun
texts = TextRun.__iter__
def marked(self):
    for i, piece in enumerate(texts(self)):
        if i == 30:
            print("started", file=sys.stderr, flush=True)
        yield piece
TextRun.__iter__ = marked
sys.exit(entry())
"""
"""Program that runs the command line and prints to standard error when 30 pieces are generated."""


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["--prompt", "b"], marks=SLOW), pytest.param(["--json"], marks=SLOW),
     pytest.param(["--speculate"], marks=SLOW)],
    ids=str,
)  # fmt: skip
def test_ctrl_c_keeps_generated_text(model: str, more: list[str]):
    """A real process, a real signal, sent once some tokens are there."""
    long = f"{model}+context=200000"
    command = [sys.executable, "-c", BEGUN, "generate", long, "--prompt", "Once", *more, "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background ignores it
    )  # fmt: skip
    assert process.stderr is not None
    patience = Timer(120, process.kill)
    patience.start()
    said = []
    for line in process.stderr:  # ends if the process does
        if line == "started\n":
            break
        said.append(line)
    patience.cancel()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, [*said, err]
    assert "Traceback" not in err and "Once" in out and len(out) > 20
    if "--json" in more:
        found = json.loads(out)
        assert found["finish"] == "cancelled" and 0 < found["tokens"] < 100_000
    else:
        assert "tokens/s" in err


@pytest.mark.parametrize(
    "more",
    [[], ["--json"], ["--state"], ["--compile"], ["--n", "2"], ["--beams", "2"], ["--speculate"], ["--draft"]],
    ids=str,
)
def test_ctrl_c_before_the_first_token(
    model: str, more: list[str], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C during prefill, while a step is compiled or a draft is loaded: no rate and no text are printed."""

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if more == ["--compile"]:
        monkeypatch.setattr(machine, "can_compile", lambda _: True)
        monkeypatch.setattr(import_module("glassformer.generation.session"), "CompiledStep", stopped)
    elif more == ["--draft"]:
        monkeypatch.setattr(import_module("glassformer.generation.texts"), "Draft", stopped)
    else:
        monkeypatch.setattr(Model, "hidden_states", stopped)
    values = {"--state": [str(tmp_path / "kept")], "--draft": [model]}
    out, err = run(capsys, model, "--prompt", PROMPT, *more, *values.get(" ".join(more), []), status=130)
    assert "the first word after" not in err and list(tmp_path.iterdir()) == []
    if more == ["--json"]:
        found = flat(out)
        assert (found["finish"], found["seconds_to_first_token"]) == ("cancelled", None)
    else:
        assert err.startswith("16 tokens given; 0 written; state")


@pytest.mark.parametrize(("reason", "finish", "status"), [
    (KeyboardInterrupt, "cancelled", 130), (MemoryError, "failed", 1), (RequestError, "failed", 2),
])  # fmt: skip
def test_a_beam_search_that_ends_early_shows_its_texts(
    reason: type[BaseException], finish: str, status: int, model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    options = ["--prompt", PROMPT, "--beams", "2", "--ignore-eos"]
    short = made(capsys, model, *options, "--max-new-tokens", "3")
    module = import_module("glassformer.generation.beams")
    decode, steps = module.decode, [0]

    def stopping(*given: Any) -> torch.Tensor:
        steps[0] += 1
        if steps[0] == 3:
            raise reason("x", code="failed", field="x") if reason is RequestError else reason
        return decode(*given)

    monkeypatch.setattr(module, "decode", stopping)
    document, _ = run(capsys, model, *options, "--max-new-tokens", "9", "--json", status=status)
    found = flat(document)
    assert (found["tokens"], found["text"], found["finish"]) == (3, short["text"], finish)
    assert ("error" in json.loads(document)) == (reason is not KeyboardInterrupt)
    steps[0] = 0
    out, _ = run(capsys, model, *options, "--max-new-tokens", "9", status=status)
    assert out == f"{PROMPT}{short['text']}\n"


def test_ctrl_c_while_the_model_is_loaded(model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("glassformer.naming.chatting"), "load", stopped)
    assert run(capsys, model, "--prompt", PROMPT, status=130) == ("", "stopped\n")


@pytest.mark.slow
@pytest.mark.skipif(not machine.can_compile("cpu"), reason="no compiler here")
def test_compiled_steps_generate_equal_text(model: str, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch):
    import jaxtyping

    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    jaxtyping.config.update("jaxtyping_disable", True)  # while a step is traced its sizes are symbols
    try:
        options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20"]
        plain, _ = run(capsys, model, *options)
        for says in (True, False):
            out, err = run(capsys, model, *options, "--compile")
            assert out == plain and ("once for each model" in err) == says
        kept = ["--state", str(tmp_path / "kept")]
        for _ in range(2):
            assert run(capsys, model, *options, "--compile", *kept)[0] == plain
        both = made(capsys, model, *options, "--prompt", "b", "--compile")["texts"]
        assert PROMPT + both[0]["text"] + "\n" == plain
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_every_option_is_explained(verb: str):
    arguments = app[verb].assemble_argument_collection(parse_docstring=True)
    named = [argument for argument in arguments if argument.name not in ("--how", "*")]
    assert len(named) > 14
    assert not [argument.name for argument in named if not argument.parameter.help and not argument.children]


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_imports_no_torch(verb: str):
    code = (
        "import sys\nfrom glassformer.cli import main\n"
        f"assert main([{verb!r}, '--help']) == 0\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


BF16_NOISE = 0.1
"""Log-probabilities computed from activations in bf16 differ by less: a tenth of their standard deviation here."""


def assert_near(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Asserts that two greedy texts are equal up to a token with two candidates within `BF16_NOISE`."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        likely = {one["id"]: one["logprob"] for one in a["top"]}
        assert likely[b["id"]] == pytest.approx(b["logprob"], abs=BF16_NOISE)
        if a["id"] != b["id"]:
            assert likely[b["id"]] == pytest.approx(a["logprob"], abs=BF16_NOISE)
            return


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--prompt", "And then"],
        ["--beams", "3"],
        ["--speculate"],
        ["--logprobs", "2"],
        ["--quantize", "int8"],
        ["--quantize", "bf16"],
        ["--state", "kept"],
        ["--temperature", "1", "--top-p", "0.9", "--seed", "3"],
    ],
    ids=" ".join,
)
def test_device_without_fp64_generates_equal_text(
    model: str, capsys: Said, tmp_path: Path, more: list[str], monkeypatch: Any
):
    """A device made in Python, without fp64 (tests/elsewhere.py), which `auto` selects, gives the same text."""
    if "bf16" in more and not onednn_in_bf16():
        pytest.skip("this processor has no products in bf16")
    monkeypatch.chdir(tmp_path)
    if "--temperature" not in more:
        more = [*more, "--temperature", "0"]
    if "--quantize" in more:
        more = [*more, "--logprobs", "5"]
    asked = [model, "--prompt", PROMPT, "--max-new-tokens", "12", *more]
    here = made(capsys, *asked, "--device", "cpu")
    Path("kept").unlink(missing_ok=True)
    with elsewhere.device(double=False) as name:
        out, err = run(capsys, *asked, "--json")
        again = made(capsys, *asked) if "--state" in more else None
    there = flat(out)
    on = "" if "bf16" in more else f"on {name}\n"  # only the CPU lays weights out
    assert err.startswith(on)
    if "--quantize" in more:  # products of packed weights are rounded to bf16, differently on each device
        assert_near(there["logprobs"], here["logprobs"])
    else:
        assert [text["text"] for text in there["texts"]] == [text["text"] for text in here["texts"]]
    assert again is None or again["texts"] == there["texts"]


def test_a_device_that_is_not_here_is_refused(model: str, capsys: Said):
    assert (
        "device='cuda:9' is not on this machine; here: cpu"
        in run(capsys, model, "--prompt", PROMPT, "--device", "cuda:9", status=2)[1]
    )


def test_prepacked_bf16_is_refused_before_weights_are_read(model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch):
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("read")

    for module in ("loading", "chatting"):
        monkeypatch.setattr(import_module(f"glassformer.naming.{module}"), "onednn_in_bf16", lambda device="cpu": False)
    monkeypatch.setattr(import_module("glassformer.conversion.checkpoints"), "read_checkpoint", read)
    document = json.loads(run(capsys, model, "Hi", "--quantize", "bf16", "--json", status=2)[0])
    assert (document["error"]["code"], document["error"]["field"]) == ("unsupported", "quantize")


@pytest.mark.parametrize(
    ("options", "taken", "says"),
    [
        ([], "none of these", ""),
        (["--quantize", "int4"], "int4 pays", ""),
        (["--quantize", "int8"], "int4 pays", "int8 saves memory"),
        (["--quantize", "int4"], "float32 is the fastest", "int4 saves memory"),
        (["--dtype", "bfloat16"], "float32 is the fastest", "bfloat16 saves memory"),
        (["--dtype", "bfloat16"], "int4 pays", ""),
        (["--quantize", "keep"], "int4 pays", "several times slower"),
    ],
)
def test_slow_choice_is_noted_before_the_model_is_loaded(
    options: list[str], taken: str, says: str, model: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
):
    """Measured on a processor with AVX2 only: keep 3.0 tokens/s, float32 12.2, int4 14.6 (docs/log.md)."""

    def load(*_: Any, **__: Any) -> None:
        raise RequestError("enough", code="unsupported", field="model")

    measured = {
        "int4 pays": {"float32": 9.0, "bf16": 5.0, "int8": 5.0, "int4": 2.0},
        "float32 is the fastest": {"float32": 5.0, "bf16": 9.0, "int8": 9.0, "int4": 5.0},
    }
    fastest = import_module("glassformer.naming.fastest")
    monkeypatch.setattr(fastest, "seconds", lambda: measured[taken])
    monkeypatch.setattr(import_module("glassformer.naming.chatting"), "load", load)
    err = run(capsys, model, "Hi", *options, status=2)[1]
    assert says in err if says else err == "glassformer: enough\n", err
