"""Published texts by name: each is a file in the cache, else a dataset of the Hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from glassformer.errors import RequestError, WorkError
from glassformer.names.known import NAMED_TEXTS
from glassformer.progress import OnProgress, silent
from glassformer.text.documents import Corpus
from glassformer.text.files import open_file
from glassformer.text.hub import open_hub

FOLDER = "texts"
"""Name of the folder of the cache for files of published texts."""


@dataclass(frozen=True)
class PublishedText:
    """Sources of a published text: a dataset and a file."""

    hub: str
    """Name of the text's dataset on the Hub."""
    file: str
    """Location of the text's file, for a machine that does not reach the Hub."""


TEXTS = dict(
    zip(
        NAMED_TEXTS,
        (
            PublishedText(
                "hf:Trelis/tiny-shakespeare", "data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn"
            ),
            PublishedText(
                "hf:Salesforce/wikitext:wikitext-2-raw-v1", "wiki.train.raw of WikiText-2 (Merity et al. 2016)"
            ),
        ),
        strict=True,
    )
)


def open_named(name: str, cache: Path, progress: OnProgress = silent) -> Corpus:
    """Opens the corpus of a published text. Raises RequestError if neither the cache nor the Hub has it."""
    text, kept = TEXTS[name], cache / FOLDER / f"{name}.txt"
    if kept.is_file():
        return replace(open_file(kept, name), name=name)
    try:
        return replace(open_hub(text.hub, cache, progress), name=name)
    except (RequestError, WorkError) as problem:
        raise RequestError(
            f"data={name!r} is read from the Hub ({text.hub}), and that failed ({problem.code}); give the file "
            f"itself ({text.file}) as --data FILE, or copy it to {kept}",
            code="missing", field="data", value=name, expected=str(kept),
        ) from problem  # fmt: skip
