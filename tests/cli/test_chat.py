"""glassformer chat: a conversation and its state."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from threading import Timer
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer import machine
from glassformer.cli import main
from glassformer.errors import RequestError, WorkError
from glassformer.generation.conversation import Conversation
from glassformer.generation.engine import Engine
from glassformer.generation.sampling import Sampled
from glassformer.options import GenerationOptions
from glassformer.text import ByteTokenizer
from glassformer.text.chat_template import ChatTemplate
from tests.refused import refused

chat = import_module("glassformer.cli.conversation")
BYTES = ByteTokenizer()


def conversation(folder: str, **asked: Any) -> Any:
    how = {name: asked.pop(name) for name in ("system", "context", "dtype", "compiled") if name in asked}
    return Conversation(gf.load(folder), GenerationOptions(**{"max_new_tokens": 10, **asked}), **how)


def kept(talk: Any) -> Any:
    """Returns the state after the last answer."""
    (read,) = talk.session._engine._reads
    return read.state


def answer(folder: str, messages: list[dict[str, str]], new: int = 10) -> str:
    """Returns the greedy answer, with a pass over the whole conversation for each token and the template in Python."""
    text = "".join(f"<{one['role'][0]}>{one['content']}\n" for one in messages) + "<a>"
    loaded, tokens = gf.load(folder), torch.tensor([BYTES.encode(text).tolist()])
    start = tokens.shape[1]
    for _ in range(new):
        with torch.no_grad():
            tokens = torch.cat([tokens, loaded.model(tokens)[:, -1:].argmax(-1)], dim=1)
        if int(tokens[0, -1]) in loaded.ends:
            break
    return BYTES.decode(tokens[0, start:].tolist())


def test_answer_equals_generation_from_the_whole_conversation(talker: str):
    talk, messages = conversation(talker, system="Be brief."), [{"role": "system", "content": "Be brief."}]
    for text in ("Hi!", "What is a cat?", "日本"):
        messages.append({"role": "user", "content": text})
        said = "".join(talk.answer(text))
        assert said == answer(talker, messages)
        messages.append({"role": "assistant", "content": said})
    assert talk.messages == messages


def test_one_turn_is_a_function(talker: str):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    expected = answer(talker, messages)
    for model in (talker, gf.load(talker)):
        assert gf.chat(model, messages[1:], system="Be brief.", max_new_tokens=10).text == expected
        assert gf.chat(model, messages, max_new_tokens=10, state_dtype="float32").text == expected
    with refused(code="conflict", field="quantize"):
        gf.chat(gf.load(talker), messages, quantize="int8")


def test_turn_prefills_only_new_tokens(talker: str, monkeypatch: pytest.MonkeyPatch, read: list[int]):
    talk = conversation(talker, max_new_tokens=3)
    read.clear()
    script(monkeypatch, b"hi!ok?")
    assert ["".join(talk.answer(text)) for text in ("first", "second")] == ["hi!", "ok?"]
    # <u>first\n<a> and the answer but for its last byte; that byte, the end of its line, <u>second\n<a>
    assert read == [12, 1, 1, 15, 1, 1]


def script(monkeypatch: pytest.MonkeyPatch, tokens: Iterable[int]) -> None:
    """Chooses these tokens, whatever the logits are."""
    given = iter(tokens)

    def choose(logits: torch.Tensor, *_: Any, **__: Any) -> Sampled:
        return Sampled(torch.tensor([next(given)]), torch.tensor([False]))

    monkeypatch.setattr(import_module("glassformer.generation.engine"), "choose", choose)


def test_characters_are_never_torn(talker: str, monkeypatch: pytest.MonkeyPatch):
    script(monkeypatch, [*"naïve 日本 🙂".encode(), 256])
    assert list(conversation(talker, max_new_tokens=40).answer("Say it")) == list("naïve 日本 🙂")


def test_an_answer_that_was_stopped_is_kept_as_far_as_it_went(
    talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C after five pieces, then within a pass of the model; the conversation continues from the partial answer."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "put", show)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    talk = conversation(talker)
    monkeypatch.setattr(chat, "Conversation", lambda *_, **__: talk)
    monkeypatch.setattr(chat, "loaded_as", lambda *_: None)
    assert main(["chat", talker, "--max-new-tokens", "9", "--threads", "1"]) == 0
    capsys.readouterr()
    first, second = (one["content"] for one in talk.messages if one["role"] == "assistant")
    whole = answer(talker, talk.messages[:1])
    assert first == "".join(pieces[:5]) and whole.startswith(first)
    assert second == answer(talker, talk.messages[:3])

    layer, calls = talk.loaded.model.layers[1], iter(range(100))
    forward = layer.forward

    def interrupted(*given: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return forward(*given)

    monkeypatch.setattr(layer, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(talk.answer("three"))
    assert talk.new == 3
    monkeypatch.setattr(layer, "forward", forward)
    assert "".join(talk.answer("four")) == answer(talker, talk.messages[:-1])


def test_a_window_that_forgot_is_read_again(windowed: str):
    """The conversation has not the end that the state has read: it must go back, and cannot."""
    talk, states = conversation(windowed), []
    for text in ("Hi!", "A longer line than the window is", "Bye"):
        said = "".join(talk.answer(text))
        assert said == answer(windowed, talk.messages[:-1])
        talk.messages[-1]["content"] = said[:-2]
        states.append(kept(talk))
    assert states[1] is not states[2]


def test_a_conversation_ends_at_the_context(talker: str):
    talk = conversation(talker, max_new_tokens=500)
    said = "".join(talk.answer("x" * 200))
    assert len(talk.session.read(talk.messages)[0]) > 256 - 10 and len(said) <= 256 - 207
    with refused(code="range", field="prompt"):
        list(talk.answer("and then?"))
    assert talk.messages[-1]["role"] == "assistant"
    talk.restart()
    assert "".join(talk.answer("Hi!")).startswith(answer(talker, [{"role": "user", "content": "Hi!"}]))


def test_turns_from_standard_input(talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    options = ["--temperature", "0", "--max-new-tokens", "10", "--threads", "1"]
    first = answer(talker, [{"role": "user", "content": "Hi!"}])
    for text, says in (
        ("Hi!\n", [first]),
        ("Hi!\n/new\n\nHi!", [first, first]),
        ("Hi!\n/quit\nmore", [first]),
        ("", []),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["chat", talker, *options]) == 0
        said = capsys.readouterr()
        assert said.out == "".join(f"{one}\n" for one in says)
        assert said.err.count("tokens/s") == len(says)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi!\n"))
    assert main(["chat", talker, "--system", "Be brief.", "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    messages = document["messages"]
    assert document["finish"] in ("length", "eos", "stop", "context") and messages[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    assert messages[2] == {"role": "assistant", "content": answer(talker, messages[:2])}


@pytest.mark.parametrize("leave", ["exit", "quit", "/exit", "/quit"])
def test_commands_are_answered_by_the_program(
    leave: str, talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A word after a slash never reaches the model; a path does."""
    lines = ["/help", "/foo bar", "/Help", "/etc/passwd holds what?", leave, "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", talker, "Hi!", "--max-new-tokens", "3", "--threads", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    asked = [one["content"] for one in json.loads(out)["messages"] if one["role"] == "user"]
    assert asked == ["Hi!", "/etc/passwd holds what?"]
    assert err.count("/new starts") == 3 and "/foo is not a command" in err


def test_how_an_answer_ended_is_shown(talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def told(tokens: list[int], shown: Any = None) -> str:
        script(monkeypatch, tokens)
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi!\n"))
        if shown is not None:
            monkeypatch.setattr(chat, "put", shown)
        assert main(["chat", talker, "--max-new-tokens", "4", "--threads", "1"]) == 0
        return capsys.readouterr().err

    def interrupted(piece: str) -> None:
        raise KeyboardInterrupt

    assert "(" not in told([*b"ok", 256])
    assert "(cut at 4 tokens) 4 tokens" in told([*b"abcd"])
    assert "(an empty answer) 0 tokens" in told([256])
    assert "(stopped) " in told([*b"abcd"], interrupted)


@pytest.mark.parametrize(("asked", "context"), [(None, 256), (64, 64), (256, 256)])
def test_the_context_is_the_models_own_or_asked_for(talker: str, asked: int | None, context: int):
    talk = conversation(talker, context=asked, max_new_tokens=500)
    assert talk.context == context
    list(talk.answer("x" * (context // 2)))
    assert context - 10 < len(talk.session.read(talk.messages)[0])


def test_a_context_above_the_models_is_refused(talker: str):
    with refused(code="range", field="context"):
        conversation(talker, context=257)


def test_a_long_context_grows(talker: str, monkeypatch: pytest.MonkeyPatch):
    """The state starts small, and the answers are those of a state made at once."""
    module = import_module("glassformer.generation.conversation")
    monkeypatch.setattr(module, "STATE_TOKENS", 100)
    talk = conversation(talker)
    messages: list[dict[str, str]] = []
    for text in ("Hi!", "What is a cat?"):
        messages.append({"role": "user", "content": text})
        said = "".join(talk.answer(text))
        assert said == answer(talker, messages)
        messages.append({"role": "assistant", "content": said})


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal")
def test_a_pasted_text_of_several_lines_is_one_message(talker: str):
    """Bracketed paste in a real terminal: ESC [200~ and ESC [201~ around the text, as xterm sends it."""
    pytest.importorskip("readline")
    import pty

    command = [sys.executable, "-m", "glassformer", "chat", talker, "--max-new-tokens", "3", "--seed", "1", "--json"]
    ours, terminal = pty.openpty()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    patience = Timer(120, process.kill)
    patience.start()
    seen, keys = b"", [b"\x1b[200~one\ntwo\nthree\x1b[201~\r", b"exit\r"]
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        seen += piece
        if keys and seen.count(b"\n> ") > 2 - len(keys):
            os.write(ours, keys.pop(0))
    patience.cancel()
    os.close(ours)
    assert process.wait(timeout=60) == 0 and not keys
    document = json.loads(seen[seen.index(b'{"messages"') :].splitlines()[0])
    assert document["messages"][0]["content"] == "one\ntwo\nthree"


def test_a_turn_that_is_refused_leaves_no_trace(
    talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """After a byte that is not UTF-8, a template's error, or Ctrl-C while rendering, the next turn is unaffected."""
    options = ["--temperature", "0", "--max-new-tokens", "10", "--threads", "1", "--json"]
    alone = answer(talker, [{"role": "user", "content": "Say hi"}])
    messages = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": alone}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("bad \udcff byte\nSay hi\n"))
    assert main(["chat", talker, *options]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["messages"] == messages and said.err.count("lone surrogate") == 1

    render = ChatTemplate.render
    for problem in (RequestError("the template says no", code="type", field="messages"), KeyboardInterrupt()):

        def rendered(self: Any, given: Any, problem: BaseException = problem) -> str:
            if given[-1]["content"] == "bad":
                raise problem
            return render(self, given)

        monkeypatch.setattr(ChatTemplate, "render", rendered)
        monkeypatch.setattr(sys, "stdin", io.StringIO("bad\nSay hi\n"))
        assert main(["chat", talker, *options]) == 0
        assert json.loads(capsys.readouterr().out)["messages"] == messages


def test_ctrl_c_at_the_prompt_hints_and_then_ends(
    talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stop, hint = KeyboardInterrupt, "Ctrl-C again, Ctrl-D or /quit ends"
    for lines, turns, hints in (
        ([stop, "Hi!", stop, stop, "never"], 1, 2),  # an answer in between resets the count
        ([stop, stop, "never"], 0, 1),
        (["Hi!", stop, "Hi!", EOFError], 2, 1),
    ):
        given = iter(lines)

        def line(_: str = "", given: Iterator[Any] = given) -> str:
            found = next(given)
            if isinstance(found, str):
                return found
            raise found

        monkeypatch.setattr(builtins, "input", line)
        assert main(["chat", talker, "--max-new-tokens", "3", "--threads", "1"]) == 0
        said = capsys.readouterr()
        assert (said.err.count("tokens/s"), said.err.count(hint)) == (turns, hints)
        assert list(given) == (["never"] if "never" in lines else [])


def test_a_context_that_does_not_fit_is_refused_before_it_is_made(
    talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wanted = gf.load(talker).model.init_state(1, 256).nbytes
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi!\n"))
    monkeypatch.setattr(machine, "free_memory", lambda device: wanted - 1)
    assert main(["chat", talker, "--threads", "1"]) == 2
    assert "the state of 256 tokens in 1 row takes 131 kB, and this machine has 131 kB" in capsys.readouterr().err
    monkeypatch.setattr(machine, "free_memory", lambda device: wanted)
    assert main(["chat", talker, "--threads", "1", "--max-new-tokens", "2"]) == 0
    assert main(["chat", talker, "--threads", "1", "--logit-bias", "257=1"]) == 2
    assert "logit_bias has the token 257" in capsys.readouterr().err


def test_a_narrow_state_and_a_bias(talker: str):
    loaded = gf.load(talker)
    talk = conversation(talker, dtype=torch.int8, logit_bias={113: 100.0})
    assert "".join(talk.answer("Hi!")) == "q" * 10
    assert kept(talk).nbytes == loaded.model.init_state(1, 256, torch.int8).nbytes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top-p", "0"], "top_p=0.0"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["--threads", "0"], "threads=0"),
    ],
)
def test_a_wrong_request_does_not_wait_for_the_model(
    talker: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fetch(*_: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(chat, "loaded_as", fetch)
    monkeypatch.setattr(machine, "apply", lambda chosen: None)
    assert main(["chat", talker, *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def test_a_model_without_a_template(model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", model, "--threads", "1"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(talker: str):
    """A real process, a real signal. The seed is one whose answers are long."""
    command = [sys.executable, "-m", "glassformer", "chat", talker, "--temperature", "5", "--max-new-tokens", "200"]
    command += ["--seed", "1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdin is not None and process.stdout is not None
    patience = Timer(60, process.kill)  # whatever it waits for
    patience.start()
    process.stdin.write("Hi!\n")
    process.stdin.flush()
    begun = process.stdout.read(3)  # the first characters of the answer
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/new\nAnd now?\n", timeout=60)
    patience.cancel()
    assert process.returncode == 0, err
    assert "Traceback" not in err and begun and err.count("tokens/s") == 2 and len(out.splitlines()) > 1


@pytest.mark.slow
@pytest.mark.skipif(not machine.can_compile("cpu"), reason="no compiler here")
@pytest.mark.parametrize("kind", ["talker", "windowed"])
def test_compiled_steps_keep_the_conversation(
    kind: str, request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    import jaxtyping

    folder = request.getfixturevalue(kind)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    jaxtyping.config.update("jaxtyping_disable", True)  # while a step is traced its sizes are symbols
    try:
        talk = conversation(folder, compiled=True, max_new_tokens=30)
        for text in ("Hi!", "What is a cat?", "Bye"):
            assert "".join(talk.answer(text)) == answer(folder, talk.messages[:-1], 30)
            talk.messages[-1]["content"] = talk.messages[-1]["content"][:20]  # the next turn has to go back
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(("verb", "status"), [("chat", 143), ("chat", 1), ("generate", 143), ("generate", 1)])
def test_partial_answer_is_printed_when_the_program_ends(
    verb: str, status: int, talker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """SIGTERM, and a step that fails, after four tokens: one JSON document holds them, and nothing more is read."""
    step, calls = Engine._step, iter(range(1000))

    def ending(self: Engine) -> None:
        if next(calls) == 4:
            if status == 143:
                os.kill(os.getpid(), signal.SIGTERM)
            raise WorkError("the step failed", code="failed")
        step(self)

    monkeypatch.setattr(Engine, "_step", ending)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi!\nnever\n"))
    more = ["--prompt", "Hi!"] if verb == "generate" else []
    asked = [verb, talker, *more, "--temperature", "0", "--max-new-tokens", "9", "--threads", "1", "--json"]
    assert main(asked) == status
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    if verb == "generate":
        assert found["texts"][0]["tokens"] == 4 and found["texts"][0]["text"]
    else:
        assert [one["role"] for one in found["messages"]] == ["user", "assistant"] and found["messages"][1]["content"]
