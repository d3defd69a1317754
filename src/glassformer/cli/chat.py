"""A conversation in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from glassformer.cli.generate import DecodedText, check_memory, compiled_step, fetch, ready, show, state_dtype
from glassformer.cli.options import Chatting
from glassformer.errors import RequestError
from glassformer.generation import CompiledStep, Sampling, stream
from glassformer.generation.speculate import agreeing
from glassformer.generation.steps import new_state
from glassformer.introspection import rows_of
from glassformer.loaded import Loaded
from glassformer.parts.state import ModelState
from glassformer.text.chat import ChatTemplate

STATE_TOKENS = 4096
"""A state for a whole conversation is made once, at most this long."""


class Conversation:
    """Messages, and the model's state after all it has read of them: a turn reads only what is new."""

    def __init__(self, loaded: Loaded, asked: Chatting, rule: Sampling):
        template = ChatTemplate.of(loaded.tokenizer) if loaded.tokenizer is not None else None
        if template is None:
            raise RequestError(
                "this model has no chat template; use glassformer generate",
                code="missing", field="tokenizer.chat_template",
            )  # fmt: skip
        self.loaded, self.template, self.asked, self.rule = loaded, template, asked, rule
        self.tokenizer: Any = loaded.tokenizer
        self.context = min(loaded.config.context, STATE_TOKENS)
        self.dtype = state_dtype(asked)
        rule.check(loaded.model.vocab_size)
        check_memory(loaded, 1, self.context, self.dtype, "add +context=TOKENS to the name of the model to keep fewer")
        self.step: CompiledStep | None = compiled_step(loaded, self.context, self.dtype) if asked.compile else None
        self.begin()

    def begin(self) -> None:
        """Forgets what was said."""
        system = self.asked.system
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.text: list[int] = []
        """Of the conversation; the state has read it from its beginning."""
        self.state: ModelState | None = None
        self.new = 0
        """Tokens of the last answer."""

    def ids(self, *more: dict[str, str]) -> list[int]:
        """Of the conversation, and of further messages."""
        text = self.template.render([*self.messages, *more])
        return self.tokenizer.encode(text, parse_specials=True).tolist()

    def answer(self, text: str) -> Iterator[str]:
        """The answer to `text` in pieces that are whole characters; stopped early, it keeps what was said."""
        asked = {"role": "user", "content": text}
        ids = self.ids(asked)
        room = self.context - len(ids)
        if room <= 1:
            raise RequestError(
                f"this conversation has {len(ids)} tokens and {self.context} are kept; begin anew with /new",
                code="range", field="prompt", value=len(ids),
            )  # fmt: skip
        state = self._at(ids)
        said, self.text = DecodedText(self.tokenizer, self.loaded.model.ends), ids
        self.messages.append(asked)  # not before: what cannot be rendered would be in the way of every later turn
        tokens = stream(
            self.loaded.model, rows_of(self.loaded.model, ids[state.length :]), min(self.asked.max_new_tokens, room),
            seed=self.asked.seed, state=state, compiled=self.step, **self.rule.model_dump(),
        )  # fmt: skip
        try:
            for token in tokens:
                if piece := said.take(int(token)):
                    yield piece
                if said.finish:
                    break
                self.text = ids + said.tokens
            if rest := said.close():
                yield rest
        finally:
            self.new = len(said.tokens)
            self.messages.append({"role": "assistant", "content": said.text})

    def _at(self, ids: list[int]) -> ModelState:
        """The state after as many of these tokens as it has read, at least one less than all."""
        if self.loaded.model.takes_prefix:  # reads a prompt as a whole
            self.state = None
        if self.state is not None:
            self.state.seek(self.state.length)  # a compiled step spreads the one row, and marks nothing in the layers
            try:
                self.state.truncate(min(agreeing(self.text[: self.state.length], ids), len(ids) - 1))
            except ValueError:  # a window or a recurrence has forgotten
                self.state = None
        if self.state is None:
            model, step = self.loaded.model, self.step
            self.state = new_state(model, 1, self.context, self.dtype) if step is None else step.init_state()
        return self.state


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
                talk.begin()
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
