"""`glassformer index` and `glassformer ask`."""

from __future__ import annotations

import json as json_
import sys
import time
from dataclasses import asdict

from rich.console import Console

from glassformer.cli.options import Asking
from glassformer.cli.running import INTERRUPTED, fetch, ready, say, show, state_dtype
from glassformer.errors import printable
from glassformer.retrieval import Asker, Index, Source, index
from glassformer.runs.live import View

EXCERPT = 100
"""Characters of a source that are shown."""


def index_data(data: str, out: str, encoder: str, passage_tokens: int | None, json: bool) -> None:
    began = time.perf_counter()
    with View(quiet=json) as view:
        made = index(data, out, encoder, passage_tokens, view.progress)
    seconds = time.perf_counter() - began
    found = {"index": out, "passages": len(made), "dimensions": made.meta["dimensions"], "seconds": seconds}
    if json:
        print(json_.dumps({**found, "encoder": made.meta["encoder"], "data": made.meta["data"]}))
    else:
        print(f"{out}: {len(made):,} passages, vectors of {made.meta['dimensions']}, {seconds:.1f} s")


def answer(question: str, folder: str, model: str, k: int, encoder: str | None, asked: Asking, json: bool) -> None:
    rule = ready(asked)
    opened = Index(folder, encoder)
    asker = Asker(opened, fetch(model, asked), state_dtype(asked))
    prompt = asker.prompt(question, k, asked.max_new_tokens)
    if not json:
        show_sources(prompt.sources)
    began, stopped = time.perf_counter(), False
    try:
        for piece in asker.stream(prompt, asked.max_new_tokens, seed=asked.seed, **rule.model_dump()):
            if not json:
                show(piece)
    except KeyboardInterrupt:
        stopped = True
    found = asker.answer(question, prompt)
    if json:
        print(json_.dumps({**asdict(found), "index": folder, "model": model}))
    else:
        print()
        tokens = f"{found.prompt_tokens:,} tokens read, {found.tokens:,} written"
        Console(stderr=True).print(f"{tokens}, {time.perf_counter() - began:.1f} s", style="dim", highlight=False)
    if stopped:
        say("stopped")
        raise SystemExit(INTERRUPTED)


def show_sources(sources: list[Source]) -> None:
    """On standard output, before the answer."""
    for number, source in enumerate(sources, 1):
        words = printable(" ".join(source.text.split()))
        excerpt = words if len(words) <= EXCERPT else f"{words[:EXCERPT]}…"
        share = "" if source.given == source.text else " (cut)" if source.given else " (not given: no room)"
        print(f"[{number}] {source.score:.3f}  {printable(source.document)} at {source.start:,}{share}")
        print(f"    {excerpt}")
    print()
    sys.stdout.flush()
