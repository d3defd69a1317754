"""A conversation in the terminal."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from rich.console import Console

from glassformer.errors import RequestError
from glassformer.generate import stream
from glassformer.state import ModelState
from glassformer.text.chat import ChatTemplate
from glassformer.train import Loaded

STATE_TOKENS = 4096
"""A state for a whole conversation is made once, at most this long."""


class Conversation:
    """Messages, and the model's state after all it has read of them: a turn reads only what is new."""

    def __init__(self, loaded: Loaded, system: str | None = None):
        template = ChatTemplate.of(loaded.tokenizer) if loaded.tokenizer is not None else None
        if template is None:
            raise RequestError("this model has no chat template; use glassformer generate")
        self.loaded, self.template = loaded, template
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.read: list[int] = []
        self.state: ModelState | None = None

    def ids(self) -> list[int]:
        tokenizer: Any = self.loaded.tokenizer
        return tokenizer.encode(self.template.render(self.messages), parse_specials=True).tolist()

    def answer(self, text: str, new: int, temperature: float, top_k: int | None, seed: int | None) -> Any:
        """Yields the answer to `text` in pieces that are whole characters; stopped early, it keeps what was said."""
        tokenizer: Any = self.loaded.tokenizer
        self.messages.append({"role": "user", "content": text})
        ids = self.ids()
        context = min(self.loaded.config.context, STATE_TOKENS)
        if len(ids) + 1 >= context:
            del self.messages[-1]
            raise RequestError(f"this conversation has {len(ids)} tokens and {context} are kept; begin anew with /new")
        if self.state is None:
            self.state, self.read = self.loaded.model.init_state(1, context), []
        same = next((i for i, (a, b) in enumerate(zip(self.read, ids, strict=False)) if a != b), len(self.read))
        same = min(same, len(ids) - 1)
        try:
            self.state.truncate(same)
        except ValueError:  # a window has forgotten
            self.state, same = self.loaded.model.init_state(1, context), 0
        self.read = ids[:same]
        made: list[int] = []
        shown = ""
        pending = ids[same:]
        try:
            limit = min(new, context - len(ids))
            for token in stream(
                self.loaded.model, torch.tensor([pending]), limit, temperature, top_k, seed, self.state
            ):
                self.read += pending
                pending = [int(token)]
                if pending[0] in self.loaded.ends:
                    break
                made += pending
                whole = tokenizer.decode(made)
                if not whole.endswith("�"):
                    yield whole[len(shown) :]
                    shown = whole
            if rest := tokenizer.decode(made)[len(shown) :]:
                yield rest
        finally:
            self.messages.append({"role": "assistant", "content": tokenizer.decode(made)})


def converse(
    loaded: Loaded,
    system: str | None,
    new: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Reads turns from the terminal or from standard input, one a line; Ctrl-C stops the answer, Ctrl-D the program."""
    console, talk = Console(stderr=True), Conversation(loaded, system)
    person = sys.stdin.isatty()
    if person:
        console.print("Ctrl-C stops an answer, /new begins anew, Ctrl-D or /quit ends", style="dim", highlight=False)
    while True:
        try:
            text = input("\n> " if person else "").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if text in ("/quit", "/exit"):
            break
        if text == "/new":
            talk = Conversation(loaded, system)
        elif text:
            _turn(talk, console, text, new, temperature, top_k, seed, as_json)
    if as_json:
        print(json.dumps({"messages": talk.messages}))


def _turn(
    talk: Conversation,
    console: Console,
    text: str,
    new: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    as_json: bool,
) -> None:
    before, began = len(talk.read), time.perf_counter()
    try:
        for piece in talk.answer(text, new, temperature, top_k, seed):
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except RequestError as problem:
        console.print(str(problem), markup=False, highlight=False)
        return
    if not as_json:
        took = time.perf_counter() - began
        print()
        console.print(f"{len(talk.read) - before} tokens in {took:.1f} s", style="dim", highlight=False)
