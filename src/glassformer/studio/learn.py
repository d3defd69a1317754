"""A forward pass in steps: the three tokens of a guide, a model of two heads shown whole, and a chosen model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from glassformer.errors import RequestError, shown
from glassformer.laboratory.inspection import readable
from glassformer.laboratory.worked import PRINTED, three_tokens
from glassformer.lens.arithmetic import ProductFactors
from glassformer.lens.page.words import spelled_text, speller, visible
from glassformer.lens.walk import WalkStep, walk, walk_part
from glassformer.loaded import Loaded
from glassformer.names.explained import texts
from glassformer.naming.models import preset
from glassformer.studio.models import check_weights
from glassformer.studio.numbers import number_table

TOY = "gpt2@0.1m+layers=1+d_model=8+heads=2+vocab_size=8+context=8+gelu:16+init.std=0.6"
"""Model of two heads whose matrices are shown whole."""
TOY_SEED = 3
WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", ".")
"""Vocabulary of the toy."""
WHOLE, SLICE = 16, 8
"""Largest width of a matrix that is shown whole, and number of columns that are shown of a wider one."""
LARGEST = 60_000_000
"""Largest number of parameters of a model that is built for the walk, with random weights."""


def three() -> dict[str, Any]:
    """Returns attention of the guide's three tokens, without and with a causal mask, and the row that it prints."""
    words = ["token 0", "token 1", "token 2"]
    steps: list[dict[str, Any]] = []
    for masked in (False, True):
        part, x = three_tokens(masked)
        found = [step for step in walk_part(part, x) if step.key != "out"]
        kept = [step for step in found if step.key in ("mask", "pattern", "z")] if masked else found
        steps += [_step(step, words, [0], {}) | {"masked": masked} for step in kept]
    pattern = next(step for step in walk_part(*three_tokens(False)) if step.key == "pattern").value[0, 0].tolist()
    printed, ours = (" ".join(f"{one:.4f}" for one in row) for row in (PRINTED, pattern))
    return {
        "steps": steps, "words": words, "printed": printed, "ours": ours,
        "commands": ["glassformer explain attention --guide"],
        "python": ['gf.explain("attention", guide=True)'],
    }  # fmt: skip


def toy(text: str) -> dict[str, Any]:
    """Returns the steps of a forward pass of the toy model over words. Raises RequestError for words outside its
    vocabulary, and for too many."""
    words = text.split()
    model = _toy()
    for word in words:
        if word not in WORDS:
            raise RequestError(
                f"{shown(word)} is not in the toy's vocabulary: {' '.join(WORDS)}",
                code="unknown", field="text", value=shown(word), expected=" ".join(WORDS),
            )  # fmt: skip
    if not 1 <= len(words) <= model.config.context:
        raise RequestError(
            f"the toy reads 1 to {model.config.context} words, not {len(words)}",
            code="range", field="text", value=len(words),
        )  # fmt: skip
    ids = [WORDS.index(word) for word in words]
    found = [_step(step, words, [0, 1], dict(enumerate(WORDS))) for step in walk(model, [ids])]
    return {
        "steps": [_tokens(ids, words), *found], "words": words, "vocabulary": list(WORDS),
        "parameters": f"{model.config.num_params():,}",
        "commands": [f"glassformer inspect {TOY}"],
        "python": [f'model = gf.preset("{TOY}").build(seed={TOY_SEED})', f'gf.capture(model, {ids}, "*")'],
    }  # fmt: skip


@lru_cache(maxsize=1)
def _toy() -> Any:
    return preset(TOY).build(seed=TOY_SEED).eval()


def chosen(loaded: Loaded, name: str, text: str, layer: int, head: int, trained: bool) -> dict[str, Any]:
    """Returns the steps of a forward pass of a model over a text, in one layer and one head. Raises RequestError for a
    text that is empty or too long, and for a layer or head that the model lacks."""
    if loaded.tokenizer is None:
        raise RequestError(f"{name} has no tokenizer", code="missing", field="model", value=name)
    ids = loaded.tokenizer.encode_prompt(text).tolist()
    if not ids:
        raise RequestError("the text is empty; type at least one character", code="missing", field="text")
    if layer >= loaded.config.n_layers:
        raise RequestError(
            f"layer {layer} is out of range: {name} has {loaded.config.n_layers}",
            code="range", field="layer", value=layer,
        )  # fmt: skip
    steps = walk(loaded.model, [ids], layer)
    words = [visible(word) for word in spelled_text(ids, loaded.tokenizer)]
    spell = speller(loaded.tokenizer)
    columns = {one: visible(spell(one)) for step in steps for one in step.columns}
    heads = next((step.value.shape[0] for step in steps if step.key == "scores"), 0)
    if head and head >= max(1, heads):
        raise RequestError(
            f"head {head} is out of range: layer {layer} has {heads}", code="range", field="head", value=head
        )
    block = list(loaded.config.layers())[layer]
    sites = ["embed", f"layers.{layer}.*", "final_norm", "logits"]
    python = f"llm = gf.load({name!r})" if trained else f"model = gf.preset({name!r}).build(seed=0)"
    return {
        "steps": [_tokens(ids, words), *(_step(step, words, [head], columns, heads) for step in steps)],
        "words": words, "layers": loaded.config.n_layers, "heads": heads, "mixer": block.mixer.kind,
        "about": texts().get(block.mixer.kind, {}),
        "parameters": f"{loaded.config.num_params():,}", "trained": trained,
        "commands": [f"glassformer inspect {shlex.quote(name)} --text {shlex.quote(text)}"],
        "python": [python, f"gf.capture({'llm.model' if trained else 'model'}, {ids}, {sites})"],
    }  # fmt: skip


@lru_cache(maxsize=1)
def untrained(expression: str) -> Loaded:
    """Returns a model of an expression with random weights that reads bytes; the latest is kept. Raises RequestError
    for one that is too large, also for the free memory, or cannot read bytes."""
    count = preset(expression).num_params()
    if count > LARGEST:
        raise RequestError(
            f"{expression} has {count:,} parameters and no weights here; a walk builds at most {LARGEST:,}, "
            "such as llama@10m",
            code="range", field="model", value=count, expected=f"at most {LARGEST:,} parameters",
        )  # fmt: skip
    check_weights(expression)
    return readable(expression, lambda event: None)


def _tokens(ids: Sequence[int], words: Sequence[str]) -> dict[str, Any]:
    """Returns the first step: words and their ids."""
    table = {
        "head": None, "rows": ["id"], "columns": list(words), "texts": [[str(one) for one in ids]],
        "levels": [[0] * len(ids)], "worked": [[f"{word} → {one}" for word, one in zip(words, ids, strict=True)]],
        "left_out": 0, "factors": [],
    }  # fmt: skip
    shape = f"(s) = ({len(ids)})"
    return {"key": "tokens", "part": "", "place": "tokens", "shape": shape, "formula": "text → ids", "tables": [table]}


def _step(
    step: WalkStep, words: Sequence[str], heads: Sequence[int], tokens: dict[int, str], of: int = 0
) -> dict[str, Any]:
    """Returns a step as a page shows it: a table for each of `heads`, out of `of` query heads, or one."""
    along = next((i for i, axis in enumerate(step.axes) if axis in "ng"), None)
    tables: list[dict[str, Any]] = []
    if along is None:
        tables.append(_table(step, None, 0, words, tokens))
    else:
        most = step.value.shape[along]
        groups = of // most if of > most and step.axes[along] == "g" else 1  # queries that share keys
        chosen_heads = dict.fromkeys(min(head // groups, most - 1) for head in heads)
        tables += [_table(step, along, head, words, tokens) for head in chosen_heads]
    return {
        "key": _key(step), "part": step.part, "place": step.place,
        "shape": f"({', '.join(step.axes)}) = ({', '.join(map(str, step.value.shape))})",
        "formula": "" if step.arithmetic is None else step.arithmetic.formula, "tables": tables,
    }  # fmt: skip


def _key(step: WalkStep) -> str:
    """Returns the key of a step's words: its kind, after that of the part that has it."""
    for part in ("ffn", "embedding"):
        if f".{part}." in step.place or step.place.startswith(f"{part}."):
            return f"{part}-{step.key}"
    return step.key


def _table(
    step: WalkStep, along: int | None, head: int, words: Sequence[str], tokens: dict[int, str]
) -> dict[str, Any]:
    x, axes = step.value, step.axes
    if along is not None:
        x, axes = x.select(along, head), axes.replace(axes[along], "")
    if "k" in axes:  # experts of a token: the first of those that it chose
        x, axes = x.select(axes.index("k"), 0), axes.replace("k", "")
    if len(axes) == 3:  # a state: after the last token
        x, axes = x[-1], axes[1:]
    rows = _labels(axes[0], x.shape[0], words, step, tokens)
    columns = _labels(axes[1], x.shape[1], words, step, tokens)
    found = x[: len(rows), : len(columns)]
    arithmetic = step.arithmetic
    worked = [] if arithmetic is None else [
        [arithmetic.cell(head, i, j) for j in range(len(columns))] for i in range(len(rows))
    ]  # fmt: skip
    factors = []
    if arithmetic is not None and arithmetic.factors is not None:
        factors = _factors(arithmetic.factors(head), rows, columns, words)
    return {
        "head": None if along is None else head, **number_table(found, rows, columns), "worked": worked,
        "left_out": x.shape[1] - len(columns), "factors": factors,
    }  # fmt: skip


def _labels(axis: str, size: int, words: Sequence[str], step: WalkStep, tokens: dict[int, str]) -> list[str]:
    """Returns the names of the rows or columns along an axis, such as "s", that are shown of a step's table."""
    if axis in "st":
        return list(words)
    if axis == "v":
        return [tokens.get(one, str(one)) for one in step.columns]
    return [str(i) for i in range(_shown(size))]


def _shown(size: int) -> int:
    return size if size <= WHOLE else SLICE


def _factors(given: ProductFactors, rows: list[str], columns: list[str], words: Sequence[str]) -> list[dict[str, Any]]:
    inner = list(words) if given.inner == "t" else [str(i) for i in range(_shown(given.left.shape[1]))]
    left, right = given.left[: len(rows), : len(inner)], given.right[: len(inner), : len(columns)]
    left_out = given.left.shape[1] - len(inner)
    return [
        {"name": given.names[0], **number_table(left, rows, inner), "left_out": left_out},
        {"name": given.names[1], **number_table(right, inner, columns), "left_out": left_out},
    ]
