"""Output of `glassformer ask`: the sources, then the answer while it is generated."""

from __future__ import annotations

import time

from rich.console import Console

from glassformer.cli.options import AskOptions
from glassformer.cli.running import INTERRUPTED, loading, put, ready, say, with_precision
from glassformer.cli.show import show
from glassformer.errors import WorkError
from glassformer.figures.terminal import dim
from glassformer.naming.chatting import loaded_as, state_dtype
from glassformer.retrieval import Asker, Index
from glassformer.retrieval.answer import source_lines


def answer(
    question: str, folder: str, model: str, k: int, encoder: str | None, asked: AskOptions, as_json: bool
) -> None:
    """Prints the sources that the index in `folder` has for a question, then the model's answer as it is generated.

    Raises SystemExit after Ctrl-C, WorkError if generation fails."""
    asked = ready(asked)
    with loading(as_json):
        opened = Index(folder, encoder)
    asked = with_precision(model, asked)
    with loading(as_json):
        asker = Asker(opened, loaded_as(model, asked), state_dtype(asked), name=model, compiled=asked.compile)
    reply = asker.submit(question, k, asked)
    if not as_json:
        put("".join(f"{line}\n" for line in source_lines(reply.sources)))
    began, interrupted, failed = time.perf_counter(), False, None
    try:
        for piece in reply:
            if not as_json:
                put(piece)
    except KeyboardInterrupt:
        interrupted = True
    except WorkError as problem:  # the answer so far is shown first
        failed = problem
    found = reply.so_far()
    if as_json:
        show(found, as_json)
    else:
        print()
        counts = f"{found.prompt_tokens:,} tokens read, {found.tokens:,} written"
        Console(stderr=True, highlight=False).print(dim(f"{counts}, {time.perf_counter() - began:.1f} s"))
    if failed is not None:
        failed.reported = as_json
        raise failed
    if interrupted:
        say("stopped")
        raise SystemExit(INTERRUPTED)
