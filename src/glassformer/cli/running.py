"""Setup of the process by the options of generate, chat and ask, and output of text."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from glassformer import machine
from glassformer.cli import waiting
from glassformer.cli.options import TextOptions
from glassformer.errors import RequestError
from glassformer.generation import Sampling
from glassformer.naming.chatting import device_of, slow_choice
from glassformer.naming.fastest import Unpaid, decided
from glassformer.runs.live import View

TOP_K = 40
"""Default top_k of verbs that generate text, unless top_p, min_p or typical_p is given."""
MOST = {"n": 1000, "beams": 256, "logprobs": 100, "max_new_tokens": 1_000_000}
INTERRUPTED = 130
"""Exit status of a command ended by Ctrl-C, as in a shell."""
Options = TypeVar("Options", bound=TextOptions)


def ready(asked: Options) -> Options:
    """Sets device, threads and seed of the process by the options; returns the options with defaults filled in.

    Raises RequestError for a value out of range."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows ?
    chosen = machine.settings(device_of(asked), threads=asked.threads, compile=asked.compile)
    machine.apply(chosen)
    if chosen.device != "cpu":
        say(f"on {chosen.device}")
    if words := slow_choice(asked):
        say(words)
        warnings.simplefilter("ignore", Unpaid)  # which would say it again
    if asked.seed is None:
        torch.seed()
    for name, most in MOST.items():
        if (value := getattr(asked, name, None)) is not None and not 0 <= value <= most:
            raise RequestError(code="range", field=name, value=value, expected=f"at most {most:,}")
    if asked.temperature is None:
        asked = replace(asked, temperature=TextOptions.temperature if getattr(asked, "beams", None) is None else 0.0)
    asked = replace(asked, logit_bias=biases(asked.logit_bias))  # type: ignore[arg-type]  # as text
    Sampling.of(asked)
    cut = any(getattr(asked, name, None) is not None for name in ("top_k", "top_p", "min_p", "typical_p", "beams"))
    return asked if cut else replace(asked, top_k=TOP_K)


def with_precision(expression: str, asked: Options) -> Options:
    """Returns the options with the precision of the model's weights decided, and says which one was chosen."""
    found, words = decided(expression, asked, device_of(asked))
    if words:
        say(words)
    return found


def biases(given: Iterable[str]) -> dict[int, float]:
    """Returns token id -> bias from texts such as 42=-100. Raises RequestError for another form."""
    found = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RequestError(
                f"logit_bias={text!r}: write ID=VALUE, such as 42=-100", code="syntax", field="logit_bias", value=text
            ) from None
    return found


@contextmanager
def loading(quiet: bool) -> Iterator[None]:
    """Shows the progress of loading a model inside the context, unless `quiet`."""
    waiting.end()
    with View(quiet=quiet):
        yield


def building() -> None:
    say("building the compiled step: one to three minutes, once for each model and precision; it is kept")
    waiting.begin("building the compiled step")


def say(text: str) -> None:
    waiting.end()
    print(text, file=sys.stderr)


def put(text: str) -> None:
    """Writes a piece of text to standard output and flushes it."""
    waiting.end()
    sys.stdout.write(text)
    sys.stdout.flush()
