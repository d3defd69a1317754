"""`gf.inspect`: parts and costs of a model, and its activations on a text."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, overload

import torch

from glassformer.dynamics.coord_check import CoordinateCheck, coordinate_check
from glassformer.errors import RequestError, keeping
from glassformer.files import check_output, output
from glassformer.generation.session import source_of
from glassformer.introspection import edit, rows_of
from glassformer.laboratory.anatomy import Anatomy
from glassformer.laboratory.exporting import Exports
from glassformer.laboratory.quality import TOKENS, Quality, QualityTable, qualities
from glassformer.lens.inspection import Inspection
from glassformer.lens.inspection import inspect as lens_inspect
from glassformer.lens.reading import Reading
from glassformer.lens.registry import PATCHING, ReadingInputs, ablation, ask, check_edits, chosen
from glassformer.loaded import Loaded
from glassformer.naming.resolve import ModelLike, has_weights, name_of, resolve
from glassformer.runs import events
from glassformer.runs.events import Notify, StageEvent
from glassformer.runs.live import shown
from glassformer.text import ByteTokenizer
from glassformer.text.pairs import START
from glassformer.typed import typed
from glassformer.units import count

LONGEST = 4096
"""Most tokens that are read; the context of the model may be shorter."""
PAGE, PICTURE = "inspect.html", "coord-check.png"
NOT_MADE = "not made: the work ended before it"
"""Reason of a reading that is missing because an inspection ended early."""


@overload
def inspect(
    model: ModelLike,
    text: str,
    *,
    source: str | None = None,
    reading: str | Sequence[str] = (),
    against: str | None = None,
    ablate: str | Sequence[str] = (),
    out: str | Path | None = None,
    force: bool = False,
    progress: bool | Notify = True,
    command: str = "",
) -> Inspection: ...


@overload
def inspect(model: ModelLike, *, exports: Literal[True], progress: bool | Notify = True) -> Exports: ...


@overload
def inspect(
    model: ModelLike,
    *,
    quality: Literal[True],
    data: str | None = None,
    tokens: int | str | None = None,
    progress: bool | Notify = True,
) -> QualityTable: ...


@overload
def inspect(
    model: ModelLike,
    *,
    coord_check: Literal[True],
    out: str | Path | None = None,
    force: bool = False,
    progress: bool | Notify = True,
) -> CoordinateCheck: ...


@overload
def inspect(model: ModelLike, *, diff: ModelLike | None = None, progress: bool | Notify = True) -> Anatomy: ...


@typed
def inspect(
    model: ModelLike,
    text: str | None = None,
    *,
    source: str | None = None,
    reading: str | Sequence[str] = (),
    against: str | None = None,
    ablate: str | Sequence[str] = (),
    out: str | Path | None = None,
    force: bool = False,
    diff: ModelLike | None = None,
    exports: bool = False,
    quality: bool = False,
    coord_check: bool = False,
    data: str | None = None,
    tokens: int | str | None = None,
    progress: bool | Notify = True,
    command: str = "",
) -> Inspection | Anatomy | Exports | QualityTable | CoordinateCheck:
    """Returns the parts and costs of a model; with a text, its activations on the text; or one of four other views.

    Parameters
    ----------
    model
        An expression, a path, a `ModelConfig`, a built `Model` or a `Loaded`. For a text, a model without weights gets
        random ones and reads bytes.
    text
        Text to read, at most 4,096 tokens of it.
    source
        With `text` and an encoder-decoder, the text that the encoder reads.
    reading
        With `text`, names of analyses in `gf.lens` to run, such as "head_scores", or "all".
    against
        With `reading="activation_patching"`, a text of the same number of tokens with another answer.
    ablate
        With `text`, components to remove: "layers.2", "layers.2.mixer", "layers.2.ffn", "layers.2.heads.1,3"; neurons
        and experts like heads.
    out
        Folder of the page inspect.html and of the figures, also with `coord_check`. If None, nothing is written.
    force
        Replace files that this program did not write.
    diff
        Another model, whose different fields are shown.
    exports
        Return the tools that can load the model, and the parts that block the others.
    quality
        Return the perplexity of a checkpoint on held-out text, unchanged and in bf16, 8 and 4 bits.
    coord_check
        Train the model at several widths for a few steps, and return how far activations move.
    data, tokens
        With `quality`, the corpus (by default python-docs) and the number of tokens to read (by default 20k).
    progress
        As in `check`: True, False, or a function that receives events.
    command
        Command that the page names as the one that made it.

    Returns
    -------
    Inspection, Anatomy, Exports, QualityTable or CoordinateCheck
        `Inspection` for a text, `Anatomy` without any option and with `diff`.

    Raises
    ------
    RequestError
        For options that exclude each other, a text that the model cannot read, and if no reading can be given.
    WorkError
        If `out` cannot be written, before anything is computed.
    WorkError, KeyboardInterrupt
        If readings or rows of `quality` end early, with the result so far as `error.so_far`.

    Examples
    --------
    >>> import glassformer as gf
    >>> gf.inspect("llama@0.3m").config.n_layers
    3
    >>> seen = gf.inspect("llama@0.3m+vocab_size=256", "Once upon a time", reading="head_scores")
    >>> len(seen.words), list(seen.readings)
    (16, ['head_scores'])
    """
    asked = {"text": text is not None, "quality": quality, "exports": exports, "coord_check": coord_check,
             "diff": diff is not None}  # fmt: skip
    several = [name for name, given in asked.items() if given]
    if len(several) > 1:
        raise RequestError(f"give one of {' and '.join(several)} at a time", code="conflict", field=several[0])
    readings, removed = _listed(reading), _listed(ablate)
    for name, given in (("source", source), ("reading", readings), ("against", against), ("ablate", removed)):
        if given and text is None:
            raise RequestError(f"{name} is for text: give the text to read", code="missing", field="text")
    if not quality and (data is not None or tokens is not None):
        raise RequestError("data and tokens are for quality", code="conflict", field="quality")
    if out is not None and text is None and not coord_check:
        message = "out is for text and coord_check: nothing else is written"
        raise RequestError(message, code="conflict", field="out", value=str(out))
    if out is not None and not str(out):
        message = "out is empty; give a folder, or leave it out for the usual one"
        raise RequestError(message, code="missing", field="out", value="")
    folder, name = None if out is None else Path(out), name_of(model)
    with shown(progress) as notify:
        if text is not None:
            texts = {"text": text, "source": source, "against": against}
            return _read(model, texts, readings, removed, folder, force, notify, command)
        if coord_check:
            return _coordinates(model, folder, force)
        if quality:
            return _measured(model, data or "python-docs", count(tokens or TOKENS, "tokens"), notify)
    if exports:
        return Exports(name, resolve(model))
    other = None if diff is None else resolve(diff)
    return Anatomy(name, resolve(model), None if diff is None else name_of(diff), other)


def _listed(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _read(
    model: ModelLike,
    texts: Mapping[str, str | None],
    readings: Sequence[str],
    removed: Sequence[str],
    folder: Path | None,
    force: bool,
    notify: Notify,
    command: str,
) -> Inspection:
    """Runs a model on a text, with some of its components removed, and returns the inspection with the readings."""
    asked, edits = chosen(readings), [ablation(one) for one in removed]
    if texts["against"] is not None and PATCHING not in asked:
        raise RequestError(
            f"against is for reading {PATCHING}: no other reading has two texts",
            code="conflict", field="against", value=texts["against"],
        )  # fmt: skip
    for option, given in texts.items():
        if given == "":
            raise RequestError(f"{option} is empty; give at least one character", code="missing", field=option)
    pages = (PAGE, *(f"{name}.png" for name in asked))
    if folder is not None:  # fails before the time is spent
        check_output(folder, *pages, force=force)
    name, trained, progress = name_of(model), has_weights(model), events.reading(notify)
    if edits and (config := resolve(model)).embedding.reads == "tokens":
        check_edits(config, edits)
    loaded = readable(model, notify)
    inner, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    with ExitStack() as edited:
        for gone in edits:
            edited.enter_context(edit(inner, gone))
        start = loaded.generation.get(START, tokenizer.eos_id) if trained and inner.encoder is not None else None
        limit = min(LONGEST, inner.config.context)

        def ids(words: str) -> list[int]:
            if start is None:
                return tokenizer.encode_prompt(words).tolist()
            return [start, *tokenizer.encode(words).tolist()]

        found = ids(str(texts["text"]))
        if len(found) > limit:
            why = f"{name} has a context of {limit:,}" if limit < LONGEST else "more are not drawn"
            notify(StageEvent(words=f"the first {limit:,} of {len(found):,} tokens are read: {why}"))
        tokens = rows_of(inner, found[:limit])
        read = source_of(inner, tokenizer, texts["source"])
        source = None if read is None else torch.tensor([read], device=inner.device)
        seen = lens_inspect(
            inner, tokens, tokenizer, source=source, name=f"{name} without {', '.join(removed)}" if removed else name,
            trained=trained, command=command, progress=progress,
        )  # fmt: skip
        other = None if texts["against"] is None else rows_of(inner, ids(texts["against"])[:limit])
        reader = inner if source is None else inner.reading(source)
        made, refused = dict[str, Reading](), dict[str, str]()

        def so_far() -> Inspection:
            rest = dict.fromkeys([name for name in asked if name not in made], NOT_MADE)
            return replace(seen, readings=made, refused=rest | refused)

        def saved() -> Inspection:
            whole = so_far()
            if folder is None:
                return whole
            with output(folder, *pages, force=force):
                return replace(whole, saved=whole.report(folder / PAGE), figures=_drawn(made, folder, notify))

        with keeping(so_far), keeping(saved):
            for one, answer in ask(asked, ReadingInputs(reader, tokens, tokenizer, seen, other), progress):
                if isinstance(answer, str):
                    refused[one] = answer
                else:
                    made[one] = answer
    if asked and not made:
        reasons = "; ".join(f"reading {name}: {reason}" for name, reason in refused.items())
        raise RequestError(reasons, code="conflict", field="reading", value=[*refused])
    with keeping(so_far):
        return saved()


def readable(model: ModelLike, notify: Notify) -> Loaded:
    """Loads the model with its tokenizer; a model without weights gets random ones, and reads bytes."""
    name = name_of(model)
    if has_weights(model):
        loaded = resolve(model, weights=True)
        if loaded.tokenizer is None:
            raise RequestError(
                f"{name} has no tokenizer; gf.lens.inspect(model, tokens) shows it with ids",
                code="missing", field="tokenizer", value=name,
            )  # fmt: skip
        for words in loaded.adapted:
            notify(StageEvent(words=words))
        return loaded
    config = resolve(model)
    if (reads := config.embedding.reads) != "tokens":
        raise RequestError(
            f"{name} reads {reads}, and a text is for models of tokens; gf.capture(model, {reads}, sites) looks inside",
            code="conflict", field="model", value=name, expected="a model of tokens",
        )  # fmt: skip
    if config.vocab_size < 256:
        raise RequestError(
            f"vocab_size={config.vocab_size} of {name} is too small for bytes, and it has no tokenizer; "
            "it must be at least 256, or the model a checkpoint",
            code="range", field="vocab_size", value=config.vocab_size,
        )  # fmt: skip
    notify(StageEvent(words=f"{name} names no checkpoint: its weights are random, and it reads bytes"))
    return replace(resolve(config, weights=True, seed=0), tokenizer=ByteTokenizer())


def _drawn(readings: Mapping[str, Reading], folder: Path, notify: Notify) -> dict[str, Path]:
    """Draws the figures of the readings into a folder. Returns {reading: file}; empty without matplotlib."""
    if readings and find_spec("matplotlib") is None:
        words = "figures are drawn by matplotlib; install it: pip install 'glassformer[figures]'"
        notify(StageEvent(words=words))
        return {}
    paths = {name: folder / f"{name}.png" for name in readings}
    for name, path in paths.items():
        readings[name].save(path)
    return paths


def _coordinates(model: ModelLike, folder: Path | None, force: bool) -> CoordinateCheck:
    if folder is None:
        return coordinate_check(resolve(model))
    with output(folder, PICTURE, force=force):
        found = coordinate_check(resolve(model))
        found.save(folder / PICTURE)
    return replace(found, picture=folder / PICTURE)


def _measured(model: ModelLike, data: str, tokens: int, notify: Notify) -> QualityTable:
    def load() -> Loaded:
        """Loads the checkpoint with weights that may be quantised in place: a built model is copied."""
        loaded = resolve(model, weights=True)
        return loaded if isinstance(model, str | Path) else copy.deepcopy(loaded)

    rows = list[Quality]()

    def made() -> QualityTable | None:
        return QualityTable(name_of(model), data, tuple(rows)) if rows else None

    with keeping(made):
        for row in qualities(load, data, tokens, events.reading(notify)):
            rows.append(row)
            notify(StageEvent(words=f"{row.weights}, head {row.head}: perplexity {row.perplexity:.4f}"))
    return QualityTable(name_of(model), data, tuple(rows))
