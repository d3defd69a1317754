"""`gf.check`: proof that a model's decoding equals its full forward pass, that it survives saving and loading, and that
it equals the published implementation.

Everything runs in fp32, on the tokens of a seed or of a text.
"""

from __future__ import annotations

import inspect
import io
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor, nn

from glassformer.conversion import is_checkpoint, locate, save
from glassformer.conversion.exports import export_targets
from glassformer.conversion.families import FAMILIES, own
from glassformer.conversion.family import Family
from glassformer.conversion.folder import read_config
from glassformer.conversion.names import Names, OwnParameter
from glassformer.conversion.storage import is_gguf
from glassformer.conversion.weights import fold, spoilt_weights
from glassformer.errors import RequestError, WorkError, keeping
from glassformer.figures.terminal import Tabular, dim, ruled
from glassformer.loaded import Loaded
from glassformer.model import Inputs, Model, Tower
from glassformer.model import locate as place
from glassformer.names.places import is_folder
from glassformer.naming import parse
from glassformer.naming.loading import load
from glassformer.naming.resolve import ModelLike, has_weights, name_of, resolve
from glassformer.parts.building import generator_of
from glassformer.parts.forward_pass import Memory, Pass
from glassformer.parts.linear import Linear
from glassformer.progress import listened, silent
from glassformer.runs.events import Notify, ReadingEvent
from glassformer.runs.live import shown
from glassformer.typed import typed
from glassformer.units import count

TOLERANCE = 1e-5
STRICTER = 4
"""Factor of the tolerance for a single module with identical input: no errors accumulate, and a wrong eps shows in the
sixth digit."""
LARGEST = 4_000_000_000
SHOWN = 12
"""Most rows of the reference that are printed if all agree, largest error first."""
STYLES = {"wrong": "bold red", "ok": "green"}
LONGEST_WINDOW = 512
Verdict = Literal["ok", "wrong", "inherited", "skipped"]
Given = dict[str, Any]
"""Arguments of our model by name: `tokens`, and `source` if it reads one."""


LEGEND = (
    "error: the largest difference; relative: its share of the largest expected value; alone: the relative error of a "
    "layer that is given the reference's own input"
)


@dataclass(frozen=True)
class Row:
    """One comparison of two tensors of a proof. `error`: the largest difference; `relative`: that over the largest
    expected value; both infinite if a value is not finite.

    `wrong` marks a site that differs by its own fault; `inherited` one that differs because an earlier site does."""

    check: Literal["weights", "decoding", "round trip", "reference"]
    site: str
    verdict: Verdict
    error: float | None = None
    relative: float | None = None
    alone: float | None = None
    """Relative error of our layer given the reference's input; None for comparisons without a reference."""
    theirs: str = ""
    """Name of the reference's module that computes the value of this site."""
    note: str = ""


@dataclass(frozen=True)
class Proof(Tabular):
    """Comparisons of a model with itself and with its reference.

    Attributes
    ----------
    rows : tuple of Row
        Every comparison, in the order of computation.
    name : str
        Text or path that names the model, or the class of its value.
    complete : bool
        False if the work ended before all comparisons were made.
    """

    rows: tuple[Row, ...]
    name: str = "Model"
    complete: bool = True

    @property
    def wrong(self) -> tuple[Row, ...]:
        """Comparisons that failed by their own fault; failures that follow from an earlier one are not among them."""
        return tuple(row for row in self.rows if row.verdict == "wrong")

    @property
    def passed(self) -> bool:
        """True if all comparisons were made and no one is wrong; skipped comparisons do not count."""
        return self.complete and not self.wrong

    @property
    def finding(self) -> str:
        """Sentence with the result of all comparisons."""
        if self.wrong:
            return f"{self.name}: wrong at {', '.join(row.site for row in self.wrong[:6])}"
        skipped = sum(row.verdict == "skipped" for row in self.rows)
        rest = f"; {skipped} skipped" if skipped else ""
        if not self.complete:
            rest += ", and others were not made"
        return f"{self.name}: {len(self.rows) - skipped} comparisons, all well{rest}"

    def check(self) -> None:
        """Raises WorkError if a comparison is wrong."""
        if not self.passed:
            raise WorkError(self.finding, code="failed")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; an infinite error is the string "inf", since JSON has no number for it."""
        return {"name": self.name, "ok": self.passed, "rows": self.records()}

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each comparison."""
        return [{key: "inf" if value == math.inf else value for key, value in asdict(row).items()} for row in self.rows]

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the printed text: a table of the wrong, the skipped and the `SHOWN` largest errors; only the finding
        if all are well."""
        table = ruled()
        for heading in ("check", "site", "", "error", "relative", "alone", "note"):
            table.add_column(heading, justify="right" if heading in ("error", "relative", "alone") else "left")
        worst = sorted(self.rows, key=lambda row: -(row.relative or 0.0))[:SHOWN]
        kept = [
            row for row in self.rows if row.verdict in ("wrong", "skipped") or row.check != "reference" or row in worst
        ]
        for row in kept:
            numbers = ("" if value is None else f"{value:.1e}" for value in (row.error, row.relative, row.alone))
            verdict = Text(row.verdict, style=STYLES.get(row.verdict, ""))
            table.add_row(row.check, row.site, verdict, *numbers, row.note or row.theirs)
        if (left := len(self.rows) - len(kept)) > 0:
            table.caption = f"and {left} more with smaller errors"
        yield table
        if any(row.alone is not None for row in kept):
            yield dim(LEGEND)
        if not self.wrong:
            yield self.finding


@typed
def check(
    model: ModelLike,
    *,
    reference: str | Path | None = None,
    text: str | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    largest: int | str = LARGEST,
    progress: bool | Notify = True,
) -> Proof:
    """Compares cached, uncached and padded logits, saves and loads, and compares with `transformers` site by site.

    Parameters
    ----------
    model
        An expression, a path, a `ModelConfig`, a built `Model` or a `Loaded`; an expression or config without weights
        gets random ones.
    reference
        Another folder, run or .gguf file to compare with. By default the checkpoint itself, read by `transformers`, or
        the files that `save` writes if a published class can hold the model.
    text
        Text to run the model on; by default random tokens.
    seed
        Seed of the random tokens and weights.
    tolerance
        Largest allowed difference, relative to the largest expected value.
    largest
        Size of weights, in bytes, above which checks that write the model to disk are skipped.
    progress
        True shows progress on standard error (bars on a terminal and in a notebook, lines elsewhere), False shows
        nothing, and a function receives the events of `glassformer.runs.events`.

    Returns
    -------
    Proof
        Every comparison with its verdict and errors; `passed`.

    Raises
    ------
    RequestError
        If the request is wrong, or `reference` cannot be used.

    Examples
    --------
    >>> import glassformer as gf
    >>> proof = gf.check("llama@0.3m+layers=1+vocab_size=65", largest=0)
    >>> proof.passed, proof.wrong
    (True, ())
    """
    rows: list[Row] = []

    def made() -> Proof | None:
        return Proof(tuple(rows), name_of(model), complete=False) if rows else None

    with keeping(made), shown(progress) as notify:
        given = {"reference": reference, "text": text, "seed": seed, "tolerance": tolerance}
        notify(ReadingEvent(stage=f"checks of {name_of(model)} done", done=0, total=None))
        for row in checks(model, largest=count(largest, "largest"), **given):  # type: ignore[arg-type]
            rows.append(row)
            notify(ReadingEvent(stage=f"checks of {name_of(model)} done", done=len(rows), total=None))
    return Proof(tuple(rows), name_of(model))


@torch.no_grad()
def checks(
    model: ModelLike,
    *,
    reference: str | Path | None = None,
    text: str | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    largest: int = LARGEST,
) -> Iterator[Row]:
    """Yields the comparisons of `check` one by one, as they are computed, and takes its options.

    A reference in the format of this package is computed by it. Reparametrised matrices are compared as they are
    applied."""
    if not 0 < tolerance < math.inf:
        raise RequestError(
            f"tolerance={tolerance}: expected a positive, finite number, as {TOLERANCE}",
            code="range", field="tolerance", value=tolerance,
        )  # fmt: skip
    loaded, source = _opened(model, reference, seed)
    ours = fold(loaded.model)
    given = _given(loaded, text, seed)
    size = sum(weight.nbytes for weight in ours.parameters())
    kept = "" if size <= largest else f"{size:,} bytes of weights are more than largest={largest:,}; give a larger one"
    trains = ours.training
    if spoilt := spoilt_weights(ours):
        for name, number in spoilt.items():
            yield Row("weights", name, "wrong", note=f"{number:,} values are NaN or infinite")
        return
    ours.eval()
    try:
        yield from _decoding(ours, given, tolerance)
        with tempfile.TemporaryDirectory() as folder:
            if not kept and shutil.disk_usage(folder).free < 1.1 * size:
                kept = f"{size:,} bytes of weights are more than is free in {folder}"
            if kept:
                yield Row("round trip", "weights", "skipped", note=kept)
            else:
                with listened(silent):  # the bar of the checks is shown
                    save(ours, None, folder)
                    row = _round_trip(ours, folder, size)
                yield row
            lies = source or (None if kept else Path(folder))
            yield from _reference(ours, given, lies, reference is not None, kept, tolerance)
    finally:
        ours.train(trains)


def _opened(model: ModelLike, reference: str | Path | None, seed: int) -> tuple[Loaded, Path | None]:
    """Loads the model in fp32. Returns it with the path of its reference, None if the reference is to be written."""
    if not isinstance(reference, str | Path | None):
        raise RequestError(
            code="type", field="reference", value=type(reference).__name__, expected="the path of a checkpoint"
        )
    source = None if reference is None else locate(str(reference))
    if source is not None and not is_checkpoint(str(source)):
        raise RequestError(
            f"reference={reference}: expected a folder with a config.json, a .gguf file or a run",
            code="missing", field="reference", value=str(reference),
        )  # fmt: skip
    if isinstance(model, str | Path):
        name, _, changes = parse(model)
        if source is None and has_weights(model) and not changes:
            path = locate(name)
            source = path if is_folder(path) or is_gguf(path) else None
    return resolve(model, weights=True, seed=seed, dtype=torch.float32), source


def _given(loaded: Loaded, text: str | None, seed: int) -> Given:
    """Returns the inputs on which a model is checked: two rows of tokens, or images or vectors, and a source of another
    length if it reads one."""
    model, vocab, draw = loaded.model, loaded.config.vocab_size, generator_of(seed)
    if (patches := model.embedding.patches) is not None:
        if text is not None:
            raise RequestError("text: this model reads images", code="conflict", field="text", value=text)
        images = torch.randn(2, patches.channels, patches.size, patches.size, generator=draw)
        return {"tokens": images.to(model.device)}
    length = _length(loaded)
    if (vectors := model.embedding.vectors) is not None:
        if text is not None:
            raise RequestError("text: this model reads vectors", code="conflict", field="text", value=text)
        return {"tokens": torch.randn(2, length, vectors.size, generator=draw).to(model.device)}
    given = {"tokens": torch.randint(vocab, (2, length), generator=draw)}
    if text is not None:
        if loaded.tokenizer is None:
            raise RequestError("text: this model has no tokenizer to read it", code="missing", field="tokenizer")
        read = torch.tensor(loaded.tokenizer.encode(text).tolist(), dtype=torch.long)
        if len(read) < 2:
            raise RequestError(
                f"text={text!r} has {len(read)} tokens; give two or more", code="range", field="text", value=text
            )
        given["tokens"] = read[:length].expand(2, -1)
    if (encoder := model.encoder) is not None:
        known = vocab if encoder.embedding.tied else encoder.embedding.vocab_size
        most = min(length + 3, encoder.embedding.limit or length + 3)
        given["source"] = torch.randint(known, (2, most), generator=draw)
    return {name: value.to(model.device) for name, value in given.items()}


def _length(loaded: Loaded) -> int:
    """Returns a length in tokens for the inputs that exceeds every window of feasible length and equals no mixer's
    number of heads."""
    mixers: list[Any] = [layer.mixer for layer in loaded.model.layers]
    reaches = [mixer.reach or 0 for mixer in mixers]
    length = max(32, *(reach + 8 for reach in reaches if reach <= LONGEST_WINDOW), 0)
    length = min(length, loaded.config.context)
    while length > 1 and length in {mixer.heads.n_heads for mixer in mixers if mixer.heads is not None}:
        length -= 1
    return length


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns (largest difference, that difference over the largest expected value), infinite if a tensor is not
    finite: any comparison with a NaN is false, and a maximum may skip it."""
    error = float((actual - expected).abs().max())
    relative = error / max(float(expected.abs().max()), 1e-12)
    return (error, relative) if math.isfinite(relative) else (math.inf, math.inf)


# Decoding and disk


def _decoding(model: Model, given: Given, tolerance: float) -> Iterator[Row]:
    """Yields the comparisons of decoding with the full pass: token by token, and in a batch of unequal rows padded on
    the left."""
    if why := _not_decoded(model):
        yield Row("decoding", "cached", "skipped", note=why)
        return
    tokens, both = given["tokens"], {name: value for name, value in given.items() if name != "tokens"}
    one, other = ({name: value[i : i + 1] for name, value in both.items()} for i in (0, 1))
    s, room = tokens.shape[1], both["source"].shape[1] if "source" in both else 0
    half = (s + 1) // 2
    whole = [model(tokens[:1], **one), model(tokens[1:, s // 3 :], **other)]
    state = model.init_state(1, s, memory_len=room)
    cached = [model(tokens[:1, :half], state, **one), *(model(tokens[:1, i : i + 1], state) for i in range(half, s))]
    yield _compared("cached", torch.cat(cached, 1), whole[0], tolerance)
    mask = torch.ones_like(tokens)
    mask[1, : s // 3] = 0
    rows = model(tokens, documents=mask, **both)
    state = model.init_state(2, s, memory_len=room)
    first = model(tokens[:, :half], state, documents=mask[:, :half], **both)
    later = [model(tokens[:, i : i + 1], state) for i in range(half, s)]
    for site, logits in (("padded", rows), ("padded and cached", torch.cat([first, *later], 1))):
        pair = [(logits[:1], whole[0]), (logits[1:, s // 3 :], whole[1])]
        yield max((_compared(site, *each, tolerance) for each in pair), key=lambda row: row.relative or 0.0)


def _not_decoded(model: Model) -> str:
    """Returns the reason why a model's cached decoding cannot equal its full pass; empty if it can."""
    if not model.causal:
        return "this model is bidirectional: it has no next token"
    mixers: list[Any] = [layer.mixer for layer in model.layers]
    for position in (mixer.attention_position for mixer in mixers):
        if position is not None and position.moves_with_length:
            return f"{position} changes with the length of the text: cached keys keep their old angle"
    return ""


def _compared(site: str, actual: Tensor, expected: Tensor, tolerance: float) -> Row:
    error, relative = errors(actual, expected)
    return Row("decoding", site, "ok" if relative <= tolerance else "wrong", error, relative)


def _round_trip(model: Model, folder: str, size: int) -> Row:
    back = load(folder)
    note = f"{size:,} bytes"
    if back.config.resolved() != model.config.resolved():
        first = next(iter(model.config.resolved().diff(back.config.resolved()).items()))
        return Row("round trip", "config", "wrong", note=f"{first[0]} was {first[1][0]} and came back as {first[1][1]}")
    returned = dict(back.model.named_parameters())
    for name, weight in model.named_parameters():
        if not torch.equal(weight.cpu().view(torch.uint8), returned[name].view(torch.uint8)):
            return Row("round trip", name, "wrong", *errors(returned[name], weight.cpu()), note=note)
    return Row("round trip", "weights", "ok", 0.0, 0.0, note=note)


# The published model


def _reference(
    model: Model, given: Given, source: Path | None, named: bool, kept: str, tolerance: float
) -> Iterator[Row]:
    """Yields the comparisons with the reference, a published implementation. `named`: True if the user gave it, so that
    a failure to load it raises RequestError; otherwise it is skipped."""
    theirs, family, why = None, None, _no_reference(model, source, named, kept)
    if not why:
        assert source is not None
        try:
            theirs = (_computed_by_us if _is_ours(source) else _published)(source).to(model.device)
            family = {**FAMILIES, own.OWN.model_type: own.OWN}.get(theirs.config.model_type)
            why = "" if family else f"model_type={theirs.config.model_type!r} is not a known family"
            # padding tokens shift the positions of some models
            if (padding := getattr(theirs.config, "pad_token_id", None)) is not None:
                given = {
                    name: torch.where(value == padding, (padding + 1) % model.vocab_size, value)
                    if name in ("tokens", "source") else value
                    for name, value in given.items()
                }  # fmt: skip
        except RequestError:
            raise
        except Exception as problem:  # errors of another library, of any kind
            said = (str(problem).splitlines() or [type(problem).__name__])[0][:200]
            why = f"transformers does not load {source.name}: {said}"
    if why and named:
        raise RequestError(f"reference={source}: {why}", code="unsupported", field="reference", value=str(source))
    if theirs is None or family is None:
        yield Row("reference", "logits", "skipped", note=why)
    else:
        family.as_ours(theirs, model)
        if "global_attention_mask" in inspect.signature(theirs.forward).parameters:
            every = torch.arange(given["tokens"].shape[1], device=model.device)
            given["global_tokens"] = (every % 7 == 0).expand(2, -1)
        yield from compare(model, theirs, family, given, tolerance)


def _no_reference(model: Model, source: Path | None, named: bool, kept: str) -> str:
    """Returns the reason why a model has no reference implementation; empty if one exists."""
    if source is None:
        return kept
    if find_spec("transformers") is None:
        return "the reference is transformers: pip install 'glassformer[hf]'"
    if not named and _is_ours(source):
        nearest = export_targets(model.config)[0]
        blockers = ", ".join(nearest.blocked_by)
        return (
            f"no published class holds this model; {nearest.family.architecture} comes nearest, blocked by {blockers}"
        )
    return ""


def _is_ours(source: Path) -> bool:
    """Returns True for a source that only this package can load: a run, a folder that no published class loads, or a
    checkpoint in its authors' format."""
    if source.is_dir():
        return not (is_folder(source) and read_config(source)[0].model_type in FAMILIES)
    return not is_gguf(source)


def _computed_by_us(source: Path) -> Any:
    from glassformer.conversion import transformers as ours

    with listened(silent):
        model = fold(load(source, dtype=torch.float32).model)
    return getattr(ours, own.OWN.architecture_of(model.config)).of(model)


def _published(source: Path) -> Any:
    import transformers

    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with redirect_stderr(io.StringIO()):  # hides progress bars, because some have no switch
        if not source.is_dir():
            how["gguf_file"] = source.name
            return transformers.AutoModelForCausalLM.from_pretrained(source.parent, **how).eval()
        family, config, _ = read_config(source)
        return getattr(transformers, family.architecture_of(config)).from_pretrained(source, **how).eval()


SITES = {"mixer.output": ("mixer.z", "mixer.out"), "mixer.out_proj": ("", "mixer.out"),
         "ffn": ("", "ffn.out"), "ffn.down_proj": ("ffn.hidden", "ffn.out"),
         "ffn.gate_proj": ("", "ffn.gate"), "ffn.up_proj": ("", "ffn.up")}  # fmt: skip
"""Our module in a layer -> the public names of its input and of its output, "" without one."""
CAUSES = {
    "embed": "the embedding, its scale, norm or positions",
    "mixer.out_proj (input)": "the projections agree and this does not: the convolution, the recurrence or its gate",
    "mixer.z": "the projections agree and this does not: position, visibility, scale, softcap or qk_norm",
    "ffn.hidden": "gate and up agree and this does not: the activation, or which of the two it is taken of",
    "resid_mid": "the mixer agrees and the stream after it does not: the residual wiring",
    "resid_post": "the branches agree and the stream after them does not: the residual wiring",
    "logits": "the head, its scale or softcap",
}
OWN = "given the reference's input, its output differs: the weights or the constants of this module"


@dataclass(frozen=True)
class Pair:
    """Two modules that compute the same, ours and the reference's, and the indices of the features that correspond
    (None for all, in order)."""

    ours: str
    theirs: str
    mine: Tensor | None
    other: Tensor | None


def pairs(model: Model, theirs: nn.Module, names: Names, called: Callable[[str], str]) -> list[Pair]:
    """Returns pairs of our and the reference's modules (of layers, and final norms) that compute the same, matched by
    the names of their weights; `called` maps a name in the reference's file to that of its class."""
    known, found = dict(theirs.named_modules()), list[Pair]()
    for prefix, tower, within in towers(model, names):
        for path, module in tower.named_modules(prefix=prefix.rstrip(".")):
            inner = path.removeprefix(prefix)
            _, layer, part = (*inner.split(".", 2), "", "")[:3]
            if f".{part}" in within.wholes:
                found.append(Pair(path, within.layer.replace("*", layer) + within.wholes[f".{part}"], None, None))
                continue
            weight = next(module.parameters(recurse=False), None)
            if weight is None or f".{part}" in within.apart or not inner.startswith(("layers.", "final_norm")):
                continue
            try:
                layout, stem = names.layout(path)
            except KeyError:  # a part that the family lacks
                continue
            mixer: Any = tower.get_submodule(f"layers.{layer}.mixer") if inner.startswith("layers.") else None
            features = (sum(module.outs),) if isinstance(module, Linear) else tuple(weight.shape)
            for piece in layout.pieces(OwnParameter(features, "weight", module, mixer)):
                mine = None if piece.ours is None and piece.row is None else piece.mine(_counted(features)).flatten()
                other = None if piece.theirs is None else piece.theirs(_counted(piece.shape)).flatten()
                there = called((stem + piece.name).removesuffix(".weight"))  # some layouts name the tensor itself
                if there in known:
                    found.append(Pair(path, there, mine, other))
    return found


def towers(model: Model, names: Names) -> list[tuple[str, Tower, Names]]:
    """Returns (prefix of the modules' names, the tower, the family's names) of each tower (encoder or decoder), in the
    order of computation."""
    own: list[tuple[str, Tower, Names]] = [("", model, names)]
    if model.encoder is None:
        return own
    return [("encoder.", model.encoder, names.encoder or names), *own]


def _counted(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


Seen = dict[str, tuple[Tensor, Tensor]]


@contextmanager
def watch(modules: dict[str, nn.Module], copies: bool = False) -> Iterator[Seen]:
    """Context manager that records {name: (input, output)} of the first call of each module, in the order in which
    calls end; `copies` if the model may change them in place later."""
    seen: Seen = {}
    hooks = []
    for name, module in modules.items():

        def keep(module: nn.Module, args: Any, kwargs: Any, value: Any, name: str = name) -> None:
            if not (given := [*args, *kwargs.values()]):  # a table that returns its weight
                return
            first = given[0]
            both = (first, value[0] if isinstance(value, tuple) else value)
            seen.setdefault(name, (both[0].clone(), both[1].clone()) if copies else both)

        hooks.append(module.register_forward_hook(keep, with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def compare(
    model: Model, theirs: nn.Module, family: Family, given: Given, tolerance: float = TOLERANCE
) -> Iterator[Row]:
    """Yields the comparisons of a model with its reference `theirs`, site by site in the order of computation. Each of
    our layers, and each module in it, also runs separately on the reference's input, so that an earlier error cannot
    mask a later one."""
    names = family.names_of(model.config)
    both, each = pairs(model, theirs, names, family.of_class), towers(model, names)
    layers = {
        prefix: [
            family.of_class(within.layer.replace("*", str(i)).rstrip("."))
            for i in range(len(tower.layers) // within.blocks)
        ]
        for prefix, tower, within in each
    }
    _refuse_another_shape(model, theirs, layers)
    paths = [path for some in layers.values() for path in some]
    wanted = {path: theirs.get_submodule(path) for path in (*paths, *(pair.theirs for pair in both))}
    with watch(wanted, copies=True) as there:
        expected = _answer(model, theirs(**_theirs(model, theirs, given)))
    paired = {pair.ours for pair in both}
    mine = {name: one for name, one in model.named_modules() if name in paired or name.endswith(".resid_mid")}
    blocks = {f"{prefix}layers.{i}": block for prefix, tower, _ in each for i, block in enumerate(tower.layers)}
    with watch({**mine, **blocks}) as whole:
        end = model(**given)
    found = _Findings([pair for pair in both if pair.theirs in there], mine, there, whole, tolerance)
    x, memory = end, None
    for prefix, tower, within in each:
        read = given["source" if prefix else "tokens"]
        at = place(tower.embedding.places(read), Inputs(read))
        for path in layers[prefix]:  # some classes pad their inputs
            first, last = there[path]
            there[path] = first[:, : at.tokens], last[:, : at.tokens]
        at.memory, at.global_tokens = memory, None if prefix else given.get("global_tokens")
        x = yield from _tower(found, prefix, tower, within.blocks, layers[prefix], at)
        memory = Memory(x)
    yield found.row("logits", end, model.unembed(x), expected, "logits", own=True)


def _tower(
    found: _Findings, prefix: str, tower: Tower, blocks: int, layers: list[str], at: Pass
) -> Generator[Row, None, Tensor]:
    """Yields the comparisons of a tower's layers and of its final norm; `blocks` of our layers are one of theirs.
    Returns the reference's output of the tower."""
    first, there = found.whole[f"{prefix}layers.0"][0], found.there
    yield found.row(f"{prefix}embed", first, first, there[layers[0]][0], layers[0])
    for i, path in enumerate(layers):
        out, found.broken = there[path][0], False
        for number in range(i * blocks, (i + 1) * blocks):
            name = f"{prefix}layers.{number}"
            with watch({inner: one for inner, one in found.mine.items() if inner.startswith(f"{name}.")}) as alone:
                out = tower.layers[number](out, at)
            yield from found.inside(name, alone)
        yield found.row(f"{name}.resid_post", found.whole[name][1], out, there[path][1], path)
    x = there[layers[-1]][1]
    if tower.final_norm is not None:
        name = f"{prefix}final_norm"
        with watch({name: tower.final_norm}) as alone:
            x = tower.final_norm(x)
        yield from found.inside(name, alone)
        x = next((there[pair.theirs][1] for pair in found.both if pair.ours == name), x)
    return x


def _theirs(model: Model, theirs: Any, given: Given) -> dict[str, Any]:
    """Returns `given` as keyword arguments of `theirs`, a model of the published class."""
    tokens, more = given["tokens"], dict[str, Any]()
    if model.causal and model.config.head.predicts_tokens:
        more["use_cache"] = False
    if model.embedding.patches is not None:
        return {"pixel_values": tokens, **more}
    if model.encoder is not None:
        return {"input_ids": given["source"], "decoder_input_ids": tokens, **more}
    if "global_tokens" in given:
        more["global_attention_mask"] = given["global_tokens"].long()
    return {"input_ids": tokens, **more}


def _answer(model: Model, out: Any) -> Tensor:
    """Returns the output `out` of the published class in the form of our model's: logits, classes or vectors."""
    head = model.config.head
    if not head.vector:
        return out.logits
    return out.pooler_output if head.pool else out.last_hidden_state


def _refuse_another_shape(model: Model, theirs: Any, layers: dict[str, list[str]]) -> None:
    for paths in layers.values():
        found = len(theirs.get_submodule(paths[0].rpartition(".")[0]))
        if found != len(paths):
            raise RequestError(
                f"reference: it has {found} layers, and this model has {len(paths)}",
                code="conflict", field="reference.n_layers", value=found,
            )  # fmt: skip
    if model.embedding.reader is None:
        mine, other = tuple(model.embedding.applied().shape), tuple(theirs.get_input_embeddings().weight.shape)
        if mine != other:
            raise RequestError(
                f"reference: its embedding has the shape {other}, and this model's has {mine}",
                code="conflict", field="reference.embedding", value=other,
            )  # fmt: skip


@dataclass
class _Findings:
    """Record of wrong modules, which distinguishes a module's errors from those inherited from earlier modules."""

    both: list[Pair]
    mine: dict[str, nn.Module]
    there: Seen
    whole: Seen
    tolerance: float
    broken: bool = False
    """True if an earlier module is wrong in this layer."""
    ever: bool = False
    """True if an earlier module is wrong in the model."""

    def inside(self, name: str, alone: Seen) -> Iterator[Row]:
        """Yields the comparisons of the modules of one block, which ran separately on the reference's input of its
        layer."""
        mid = alone.get(f"{name}.residual.resid_mid", (None, None))[1]
        shown, wrong = {""}, list[str]()  # wrong: modules, and the path to them
        for path, (given, made) in alone.items():
            for pair in (pair for pair in self.both if pair.ours == path):
                their_input, their_output = self.there[pair.theirs]
                into, out = SITES.get(path.removeprefix(f"{name}."), ("", ""))
                into = "resid_mid" if given is mid else into or f"{path} (input)"
                if into not in shown:
                    site = into if into.startswith(name) else f"{name}.{into}"
                    row = self.row(site, self.whole[path][0], given, their_input, pair.theirs)
                    if row.verdict == "wrong":
                        wrong.append(path)
                    if not into.startswith(name) or row.verdict == "wrong":
                        yield row
                shown.add(into)
                restart = _aligned(their_input, given)
                if own := restart is not None and restart.numel() == given.numel():
                    made = self.mine[path](restart.reshape(given.shape))
                own &= not any(inner.startswith(f"{path}.") for inner in wrong)  # the inner module explains it
                site = f"{name}.{out}" if out else path
                row = self.row(site, self.whole[path][1], made, their_output, pair.theirs, pair, own)
                if row.verdict == "wrong":
                    wrong.append(path)
                yield row

    def row(
        self,
        site: str,
        whole: Tensor,
        alone: Tensor,
        expected: Tensor,
        theirs: str,
        pair: Pair | None = None,
        own: bool = False,
    ) -> Row:
        """Returns the comparison at a site. `own`: True if only the module itself is between the reference's input and
        `alone`."""
        first, again = _difference(whole, expected, pair), _difference(alone, expected, pair)
        if first is None or again is None:
            return Row("reference", site, "skipped", theirs=theirs, note="laid out in another way there")
        wrong = again[1] > self.tolerance / STRICTER if own else again[1] > self.tolerance and not self.broken
        inherited = max(first[1], again[1]) > self.tolerance and self.ever
        self.broken |= wrong
        self.ever |= wrong
        verdict: Verdict = "wrong" if wrong else "inherited" if inherited else "ok"
        note = CAUSES.get(re.sub(r"^(encoder\.)?(layers\.\d+\.)?", "", site), OWN) if wrong else ""
        return Row("reference", site, verdict, *first, alone=again[1], theirs=theirs, note=note)


def _aligned(theirs: Tensor, ours: Tensor) -> Tensor | None:
    """Returns their activation as (b, s, features) if ours is (b, s, ...); None if its layout differs."""
    b, s = ours.shape[:2]
    if theirs.dim() == 3 and theirs.shape[1] == b != s <= theirs.shape[0]:
        theirs = theirs[:s].transpose(0, 1)  # (s, b, features), padded at the end
    if theirs.dim() == 4 and theirs.shape[1] != s:
        theirs = theirs.transpose(1, 2)  # (b, n, s, h)
    return theirs.reshape(b, s, -1) if theirs.numel() % (b * s) == 0 else None


def _difference(ours: Tensor, theirs: Tensor, pair: Pair | None) -> tuple[float, float] | None:
    """Returns (largest difference, relative difference) of two activations over the features of the pair; None if their
    layouts differ."""
    if ours.dim() == 2:  # one row per text
        return errors(ours, theirs) if ours.shape == theirs.shape else None
    mine, other = ours.flatten(2), _aligned(theirs, ours)
    if other is not None and pair is not None:
        mine = mine if pair.mine is None else mine[..., pair.mine]
        other = other if pair.other is None else other[..., pair.other]
    return errors(mine, other) if other is not None and mine.shape == other.shape else None
