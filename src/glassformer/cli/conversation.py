"""Conversation with a model in the terminal (`glassformer chat`)."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress

from rich.console import Console

from glassformer.cli import waiting
from glassformer.cli.options import ChatOptions
from glassformer.cli.running import INTERRUPTED, building, loading, put, ready, with_precision
from glassformer.cli.show import show
from glassformer.cli.start import Terminated
from glassformer.errors import RequestError, WorkError, shown
from glassformer.figures.terminal import dim
from glassformer.generation.conversation import Conversation
from glassformer.naming.chatting import loaded_as, state_dtype
from glassformer.units import plural

LEAVE = ("/quit", "/exit", "quit", "exit")
HELP = """/new starts a new conversation
/quit ends the program, as do exit, quit and Ctrl-D
/help shows these lines
Ctrl-C stops an answer
A text of several lines that is pasted is one message."""
COMMAND = re.compile(r"/[A-Za-z]+(?!\S)")
"""Pattern of a command, such as /new, at the start of a line: it is for the program, not for the model."""


def converse(expression: str, asked: ChatOptions, as_json: bool, first: str | None = None) -> None:
    """Reads turns, one a line, from the terminal or standard input, and answers them until the input ends.

    Ctrl-C stops an answer, Ctrl-D the program; `first` is answered before any input."""
    asked, console = with_precision(expression, ready(asked)), Console(stderr=True, highlight=False)
    with loading(as_json):
        loaded = loaded_as(expression, asked)
    talk = Conversation(
        loaded, asked, system=asked.system, context=asked.context,
        dtype=state_dtype(asked), compiled=asked.compile, on_build=building,
    )  # fmt: skip
    waiting.end()
    terminal = sys.stdin.isatty()
    if terminal:
        _paste_whole()
        console.print(dim("Ctrl-C stops an answer, /new starts again, /help lists more, Ctrl-D or /quit ends"))
    try:
        _turns(talk, console, terminal, as_json, first)
    except Terminated:
        raise SystemExit(INTERRUPTED) from None
    except WorkError as problem:
        problem.reported = as_json
        raise
    finally:  # after any end, the messages so far are shown
        if as_json:
            show(talk, as_json)


def _turns(talk: Conversation, console: Console, terminal: bool, as_json: bool, first: str | None) -> None:
    """Reads turns and answers them until a command such as /quit, or the end of the input."""
    warned, given = False, [] if first is None else [first]
    while True:
        try:
            text = given.pop() if given else input("\n> " if terminal else "").strip()
            warned = False
            if text in LEAVE:
                break
            if text == "/new":
                talk.restart()
            elif text and COMMAND.match(text):
                unknown = "" if text == "/help" else f"{shown(text.split()[0])} is not a command. "
                console.print(dim(f"{unknown}{HELP}"))
            elif text:
                _turn(talk, console, text, as_json)
        except EOFError:
            break
        except Terminated:
            raise
        except KeyboardInterrupt:  # at the prompt, or just as an answer ended
            if warned:
                break
            warned = True
            console.print(dim("\nCtrl-C again, Ctrl-D or /quit ends"))


def _paste_whole() -> None:
    """Makes a pasted text of several lines count as one line, if GNU readline is installed."""
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def _turn(talk: Conversation, console: Console, text: str, as_json: bool) -> None:
    began = time.perf_counter()
    try:
        for piece in talk.answer(text):
            if not as_json:
                put(piece)
    except Terminated:
        raise
    except KeyboardInterrupt:
        pass
    except RequestError as problem:
        console.print(str(problem), markup=False)
        return
    if not as_json:
        print()
        speed = talk.new / (time.perf_counter() - began)
        ended = {"cancelled": "(stopped) ", "length": f"(cut at {plural(talk.new, 'token')}) "}.get(
            talk.finish or "", ""
        )
        empty = "" if talk.new or ended else "(an empty answer) "
        console.print(dim(f"{ended}{empty}{plural(talk.new, 'token')}, {speed:.1f} tokens/s"))
