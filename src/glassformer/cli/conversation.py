"""A conversation in the terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console

from glassformer.cli import waiting
from glassformer.cli.options import ChatOptions
from glassformer.cli.running import building, put, ready
from glassformer.cli.show import show
from glassformer.errors import RequestError
from glassformer.figures.terminal import dim
from glassformer.generation.conversation import Conversation
from glassformer.naming.chatting import loaded_as, state_dtype


def converse(expression: str, asked: ChatOptions, as_json: bool, first: str | None = None) -> None:
    """Reads turns from the terminal or from standard input, one a line; Ctrl-C stops the answer, Ctrl-D the program."""
    asked, console = ready(asked), Console(stderr=True, highlight=False)
    talk = Conversation(
        loaded_as(expression, asked), asked, system=asked.system, dtype=state_dtype(asked), compiled=asked.compile,
        on_build=building,
    )  # fmt: skip
    waiting.end()
    terminal = sys.stdin.isatty()
    if terminal:
        console.print(dim("Ctrl-C stops an answer, /new starts again, Ctrl-D or /quit ends"))
    warned, given = False, [] if first is None else [first]
    while True:
        try:
            text = given.pop() if given else input("\n> " if terminal else "").strip()
            warned = False
            if text in ("/quit", "/exit"):
                break
            if text == "/new":
                talk.restart()
            elif text:
                _turn(talk, console, text, as_json)
        except EOFError:
            break
        except KeyboardInterrupt:  # at the prompt, or one that came as an answer ended
            if warned:
                break
            warned = True
            console.print(dim("\nCtrl-C again, Ctrl-D or /quit ends"))
    if as_json:
        show(talk, as_json)


def _turn(talk: Conversation, console: Console, text: str, as_json: bool) -> None:
    began = time.perf_counter()
    try:
        for piece in talk.answer(text):
            if not as_json:
                put(piece)
    except KeyboardInterrupt:
        pass
    except RequestError as problem:
        console.print(str(problem), markup=False)
        return
    if not as_json:
        print()
        speed = talk.new / (time.perf_counter() - began)
        console.print(dim(f"{talk.new} tokens, {speed:.1f} tokens/s"))
