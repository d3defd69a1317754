"""Training data: a corpus, divided, tokenised, and mapped into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glassformer.errors import shown
from glassformer.progress import OnProgress, silent
from glassformer.text.batches import refuse_long
from glassformer.text.corpora import Corpus, open_corpus
from glassformer.text.held_out import Split, split
from glassformer.text.shards import TokenShards, token_shards
from glassformer.text.tokenizers import (
    DEFAULT_BPE,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    parse_spec,
)

SMALL_BYTES = 4_000_000
SMALL_ALPHABET = 256


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of both sides of the data, to train on (`train`) and held out (`validation`), with their tokenizer."""

    tokenizer: Tokenizer
    train: TokenShards
    validation: TokenShards
    token_bytes: np.ndarray  # (vocab_size,) int64; all 0 if the tokenizer loses part of the held-out text

    @classmethod
    def open(cls, tokenizer: str, train: str, validation: str) -> Tokens:
        """Returns the tokens, mapped into memory, in the folders that `places` returned, in any process. Raises
        RequestError for a damaged folder."""
        made = load_tokenizer(tokenizer)
        sides = TokenShards.open(train), TokenShards.open(validation)
        return cls(made, *sides, sides[1].token_bytes(made))

    tokenizer_rule = "given"

    @property
    def name(self) -> str:
        return "tokens in memory"

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: one if the tokenizer loses part of the held-out text, otherwise none."""
        if not (lost := self.validation.lost):
            return []
        return [f"The {self.tokenizer.kind} tokenizer loses part of the held-out text ({lost}): no bits per byte."]

    def describe(self) -> dict[str, object]:
        """Returns the content of the field `data` of results.json, as plain values."""
        return {
            "name": self.name,
            "fingerprint": f"{self.train.folder.name} {self.validation.folder.name}",
            "bytes": self.train.bytes + self.validation.bytes,
            "train_bytes": self.train.bytes,
            "validation_bytes": self.validation.bytes,
            "train_tokens": len(self.train),
            "validation_tokens": len(self.validation),
            "tokenizer": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_fingerprint": self.tokenizer.fingerprint(),
            "tokenizer_rule": self.tokenizer_rule,
            **self.train.info["notes"],  # number of documents, and rule of the division
        }

    def places(self, tokenizer: str | Path) -> dict[str, str]:
        """Saves the tokenizer into the folder `tokenizer`; returns the arguments of `open` by name, the folders of the
        tokenizer and of both sides."""
        self.tokenizer.save(tokenizer)
        folders = {"train": self.train.folder, "validation": self.validation.folder}
        return {
            "tokenizer": str(Path(tokenizer).resolve()),
            **{side: str(folder.resolve()) for side, folder in folders.items()},
        }


@dataclass(frozen=True, eq=False)
class TextData(Tokens):
    """Tokens of a corpus, divided into training and held-out tokens, with the corpus itself."""

    corpus: Corpus
    tokenizer_rule: str

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about parts of the text that were changed, skipped or lost."""
        found, told = self.corpus.notes, []
        if wrong := found.get("replaced_bytes"):
            told.append(f"Not UTF-8, and read as U+FFFD: {wrong:,} of the bytes of {self.name}.")
        if isinstance(skipped := found.get("skipped"), dict) and skipped:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in skipped.items())
            named = ", ".join(map(shown, named)) if isinstance(named := found.get("skipped_files"), list) else ""
            ids = ": give such a file to train on its ids" if "token ids" in skipped else ""
            told.append(f"Some files of {self.name} were skipped: {kinds}{f' ({named})' if named else ''}{ids}.")
        return [*told, *super().notes]

    def describe(self) -> dict[str, object]:
        """Returns the content of the field `data` of results.json, as plain values."""
        what = super().describe()
        del what["name"], what["fingerprint"]
        return {**self.corpus.describe(), **what}


def choose_tokenizer(corpus: Corpus) -> tuple[str, str]:
    """Returns (SPEC of a tokenizer, reason): `char` for a text of less than SMALL_BYTES bytes and at most
    SMALL_ALPHABET different characters, otherwise `bpe:4096`.

    Reads at most the first SMALL_BYTES of text.
    """
    subword, megabytes = f"bpe:{DEFAULT_BPE}", f"{SMALL_BYTES / 1e6:g} MB"
    size, alphabet = 0, set[str]()
    for document in corpus.documents():
        for piece in document.pieces():
            size += len(piece.encode())
            alphabet.update(piece)
            if size >= SMALL_BYTES:
                return subword, f"auto: {subword}, as the text has {megabytes} or more"
            if len(alphabet) > SMALL_ALPHABET:
                return subword, f"auto: {subword}, as the text has more than {SMALL_ALPHABET} characters"
    few = f"{len(alphabet)} different characters (at most {SMALL_ALPHABET})"
    return "char", f"auto: char, as the text has less than {megabytes} and {few}"


def trained_tokenizer(
    spec: str, sides: Split, cache_dir: str | Path | None = None, progress: OnProgress | None = None
) -> Tokenizer:
    """Returns the tokenizer that `spec` names, trained on the training side of a divided corpus, or read from the
    cache."""
    size = sides.corpus.size
    return make_tokenizer(
        spec,
        sides.train.documents,
        all_documents=sides.corpus.documents,
        fingerprint=sides.train.fingerprint,
        total_bytes=None if size is None else int(size * (1 - sides.fraction)),
        cache_dir=cache_dir,
        progress=progress,
    )


def prepare(
    data: str | Path,
    tokenizer: str | Tokenizer = "auto",
    context: int | None = None,
    cache_dir: str | Path | None = None,
    progress: OnProgress | None = None,
    held_out: float = 0.1,
    seed: int = 0,
) -> TextData:
    """Returns tokens of the corpus DATA to train on and held-out tokens, from the cache if they were prepared before.

    `tokenizer` is `auto` (see `choose_tokenizer`), `byte`, `char`, `word:SIZE`, `bpe:SIZE`, the path of a
    tokenizer.json, or a Tokenizer. `seed` only divides the documents: runs with other training seeds share one
    division. `context`, if given, is checked against both sides. A wrong request raises RequestError before anything is
    written except the tokenizer and shards of the cache.
    """
    progress = progress or silent
    if isinstance(tokenizer, str) and tokenizer != "auto":
        parse_spec(tokenizer)  # refuses a misspelling before a large corpus is read
    corpus = open_corpus(data, cache_dir, progress)
    sides = split(corpus, held_out, seed, progress)
    if isinstance(tokenizer, Tokenizer):
        made, rule = tokenizer, "given"
    else:
        chosen = choose_tokenizer(corpus) if tokenizer == "auto" else (tokenizer, f"asked for: {tokenizer}")
        spec, rule = chosen
        made = trained_tokenizer(spec, sides, cache_dir, progress)

    def shards(name: str) -> TokenShards:
        side = sides.train if name == "train" else sides.validation
        return token_shards(
            side.documents,
            made,
            side.fingerprint,
            notes=sides.describe,
            total_bytes=lambda: side.bytes,
            cache_dir=cache_dir,
            stage=f"tokenizing {name}",
            progress=progress,
        )

    train, validation = shards("train"), shards("validation")
    found = TextData(made, train, validation, validation.token_bytes(made), corpus=corpus, tokenizer_rule=rule)
    for name, side in (("training", found.train), ("held-out", found.validation)):
        if context is not None:
            refuse_long(context, len(side), f"{name} text of {corpus.name} ({made.kind} tokenizer)")
    return found
