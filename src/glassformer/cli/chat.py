"""A conversation in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from glassformer.cli.options import Chatting
from glassformer.cli.running import building, check_memory, fetch, ready, show, state_dtype
from glassformer.errors import RequestError
from glassformer.generation import Sampling
from glassformer.generation.session import GenerationOptions, Session
from glassformer.loaded import Loaded

STATE_TOKENS = 4096
"""A state for a whole conversation is made once, at most this long."""


class Conversation:
    """Messages, and a session that keeps the state after them: a turn reads only what is new."""

    def __init__(self, loaded: Loaded, asked: Chatting, rule: Sampling):
        self.loaded, self.asked = loaded, asked
        self.context = min(loaded.config.context, STATE_TOKENS)
        self.options = GenerationOptions(max_new_tokens=asked.max_new_tokens, seed=asked.seed, sampling=rule)
        dtype = state_dtype(asked)
        self.session = Session(
            loaded, slots=1, context=self.context, dtype=dtype, compiled=asked.compile, kept=1, answers=True,
            on_build=building,
        )  # fmt: skip
        _ = self.session.template  # or it is refused
        rule.check(loaded.model.vocab_size)
        check_memory(loaded, 1, self.context, dtype, "add +context=TOKENS to the name of the model to keep fewer")
        self.restart()

    def restart(self) -> None:
        """Forgets the messages."""
        system = self.asked.system
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.new = 0
        """Number of tokens of the last answer."""

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer in pieces of whole characters; an answer that is stopped is kept as far as it came."""
        asked = {"role": "user", "content": text}
        ids, _ = self.session.read([*self.messages, asked])
        if (room := self.context - len(ids)) <= 1:
            raise RequestError(
                f"this conversation has {len(ids)} tokens of at most {self.context}; /new starts another",
                code="range", field="prompt", value=len(ids),
            )  # fmt: skip
        reply = self.session.submit(ids, replace(self.options, max_new_tokens=min(self.asked.max_new_tokens, room)))
        self.messages.append(asked)  # not before: what cannot be rendered would be in the way of every later turn
        try:
            yield from (piece.text for piece in reply if piece.text)
        finally:
            found = reply.so_far()
            reply.cancel()
            self.new = len(found.tokens) - (found.tokens[-1:] != [] and found.tokens[-1] in self.loaded.model.ends)
            self.messages.append({"role": "assistant", "content": found.text})


def converse(expression: str, asked: Chatting, as_json: bool) -> None:
    """Reads turns from the terminal or from standard input, one a line; Ctrl-C stops the answer, Ctrl-D the program."""
    rule = ready(asked)
    console, talk = Console(stderr=True), Conversation(fetch(expression, asked), asked, rule)
    person = sys.stdin.isatty()
    if person:
        console.print("Ctrl-C stops an answer, /new begins anew, Ctrl-D or /quit ends", style="dim", highlight=False)
    told = False
    while True:
        try:
            text = input("\n> " if person else "").strip()
            told = False
            if text in ("/quit", "/exit"):
                break
            if text == "/new":
                talk.restart()
            elif text:
                _turn(talk, console, text, as_json)
        except EOFError:
            break
        except KeyboardInterrupt:  # at the prompt, or one that came as an answer ended
            if told:
                break
            told = True
            console.print("\nCtrl-C again, Ctrl-D or /quit ends", style="dim", highlight=False)
    if as_json:
        print(json.dumps({"messages": talk.messages}))


def _turn(talk: Conversation, console: Console, text: str, as_json: bool) -> None:
    began = time.perf_counter()
    try:
        for piece in talk.answer(text):
            if not as_json:
                show(piece)
    except KeyboardInterrupt:
        pass
    except RequestError as problem:
        console.print(str(problem), markup=False, highlight=False)
        return
    if not as_json:
        print()
        speed = talk.new / (time.perf_counter() - began)
        console.print(f"{talk.new} tokens, {speed:.1f} tokens/s", style="dim", highlight=False)
