"""`gf.convert`, and the tools that can load a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import RenderableType

from glassformer.config import ModelConfig
from glassformer.conversion import save
from glassformer.conversion.checkpoints import Format, runs_in
from glassformer.conversion.exports import ExportTarget, export_targets
from glassformer.conversion.folder import FILES, auto_class
from glassformer.conversion.gguf import write as write_gguf
from glassformer.conversion.weights import spoilt_weights, spoilt_words
from glassformer.errors import RequestError, did_you_mean
from glassformer.figures.terminal import Printed, Tabular, size, unbroken
from glassformer.files import is_written, output
from glassformer.machine import WEIGHT_DTYPES, dtype_of
from glassformer.model import Model
from glassformer.naming.resolve import ModelLike, files_of, resolve
from glassformer.runs.events import Notify
from glassformer.runs.live import shown
from glassformer.training import training_of
from glassformer.typed import typed

FILE_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""dtype -> its name in a GGUF file."""
SMALLER: dict[Format, str] = {"hf": "bfloat16", "gguf": "q8_0"}
"""Format -> dtype that takes about half the bytes of the default for unquantised weights."""
SHOWN_TARGETS, SHOWN_BLOCKERS = 5, 4


@dataclass(frozen=True)
class Conversion(Printed):
    """Result of `convert`: the written checkpoint.

    Attributes
    ----------
    out : Path
        The folder or .gguf file.
    format : str
        "hf" or "gguf".
    family : str
        model_type of the published class that holds the model, or "glassformer".
    architecture : str
        Name of that class.
    bytes : int
        Size of what was written.
    dtype : str
        dtype of the weight matrices that were written, such as "float32" or "q8_0".
    runs_in : tuple of str
        Tools that load it.
    new_parameters, regrouped_parameters : tuple of str
        Parameters that the source lacked and were newly initialised; parameters made from another number of KV heads.
    warnings : tuple of str
        Sentences on the new and the regrouped parameters.
    replaced : bool
        True if files of an earlier conversion were replaced.
    """

    out: Path
    format: Format
    family: str
    architecture: str
    bytes: int
    dtype: str
    runs_in: tuple[str, ...]
    new_parameters: tuple[str, ...] = ()
    regrouped_parameters: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    replaced: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the result of the conversion as plain values; the architecture is called `class`."""
        return {
            "out": str(self.out), "format": self.format, "family": self.family, "class": self.architecture,
            "bytes": self.bytes, "dtype": self.dtype, "new_parameters": list(self.new_parameters),
            "regrouped_parameters": list(self.regrouped_parameters), "replaced": self.replaced,
        }  # fmt: skip

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields the printed text: warnings, and a line with the written class, size, and the programs (such as
        transformers and llama.cpp) that can load it."""
        yield from self.warnings
        if self.replaced:
            yield unbroken(f"replaced {self.out}, which this program wrote")
        yield unbroken(
            f"{self.out}: {self.architecture}, {self.dtype}, {size(self.bytes)}; runs in {', '.join(self.runs_in)}"
        )


@typed
def convert(
    source: ModelLike,
    out: str | Path,
    *,
    to: Format | None = None,
    dtype: torch.dtype | str | None = None,
    force: bool = False,
    progress: bool | Notify = True,
) -> Conversion:
    """Writes a model as a folder that `transformers` loads, or as a GGUF file that llama.cpp runs.

    Parameters
    ----------
    source
        The path or name of a run or checkpoint, with changes or not; a built `Model`, a `Loaded` or a `Run`.
    out
        Folder or .gguf file to write. What this program wrote there before is replaced; `replaced` is then True.
    to
        "hf" or "gguf"; by default "gguf" if `out` ends in .gguf, else "hf".
    dtype
        dtype of weight matrices: a torch dtype, its name, or "q8_0" (gguf only). By default unchanged, and float16 in
        a GGUF.
    force
        Replace files that this program did not write, write into a folder of other files, and write weights that are
        NaN or infinite. The source is never replaced.
    progress
        As in `check`: True, False, or a function that receives events.

    Returns
    -------
    Conversion
        Class, size, and parameters that the source lacked.

    Raises
    ------
    RequestError
        If `source` has no weights or some that are not finite, `out` cannot be written, is the source or holds other
        files, or the format cannot hold the model. Nothing is written.

    Examples
    --------
    >>> import tempfile
    >>> import glassformer as gf
    >>> model = gf.preset("llama@0.3m+layers=1+vocab_size=65").build(seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gf.convert(model, folder).architecture
    'LlamaForCausalLM'
    """
    if to not in (None, *get_args(Format)):
        raise RequestError(code="unknown", field="to", value=to, expected=" or ".join(get_args(Format)))
    kind: Format = to or ("gguf" if str(out).endswith(".gguf") else "hf")
    named = None if dtype is None else str(dtype).removeprefix("torch.")
    if kind == "hf" and named == "q8_0":
        raise RequestError(
            "dtype=q8_0 is for gguf; a Hugging Face folder takes float32, float16 or bfloat16",
            code="conflict", field="dtype", value=named,
        )  # fmt: skip
    if kind == "gguf" and named is not None and named not in FILE_TYPES:
        near = did_you_mean(named, list(FILE_TYPES)) or f"; use {', '.join(FILE_TYPES)}"
        raise RequestError(f"dtype={named}{near}", code="unknown", field="dtype", value=named)
    names = () if kind == "gguf" else FILES
    with output(out, *names, force=force, sources=files_of(source), alone=kind == "hf") as path, shown(progress):
        replaced = is_written(path, *names)
        loaded = resolve(source, weights=True)
        if not force:
            _refuse_spoilt(loaded.model, "float16" if kind == "gguf" and named is None else named, kind)
        if kind == "gguf":
            family = write_gguf(
                loaded.model, loaded.tokenizer, path, FILE_TYPES[named or "float16"],
                ends=loaded.ends, generation=loaded.generation,
            )  # fmt: skip
        else:
            family = save(
                loaded.model, loaded.tokenizer, path,
                dtype=None if named is None else dtype_of(named, known=WEIGHT_DTYPES),
                trained=training_of(str(source)) if isinstance(source, str | Path) else None,
                ends=loaded.ends, generation=loaded.generation, pooling=loaded.pooling, force=force,
            )  # fmt: skip
    written = [path] if kind == "gguf" else [one for one in path.iterdir() if one.is_file()]
    total = sum(one.stat().st_size for one in written)
    own = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    written_as = named or ("float16" if kind == "gguf" else own)
    told = list(loaded.adapted)
    if loaded.unpacked and named is None:
        told.append(
            f"weights that the source packs as {loaded.unpacked} were unpacked and are {written_as} now "
            f"({size(total)} in all); dtype {SMALLER[kind]} takes about half"
        )
    return Conversion(
        path, kind, family.model_type, family.architecture_of(loaded.config), total, written_as,
        tuple(runs_in(loaded.config, family, kind)), loaded.fresh, loaded.regrouped, tuple(told), replaced,
    )  # fmt: skip


def _refuse_spoilt(model: Model, dtype: str | None, kind: Format) -> None:
    """Raises RequestError for a model with weights that are not finite, or overflow in the dtype that is written."""
    written = None if dtype in (None, "q8_0") else dtype_of(str(dtype))  # q8_0 has a scale for each block
    spoilt = spoilt_weights(model, written, vectors=kind == "hf")
    if not spoilt:
        return
    wide = f"{dtype} is too narrow, give dtype bfloat16 or float32" if not spoilt_weights(model) else "as in the source"
    raise RequestError(
        f"there would be {spoilt_words(spoilt)}: {wide}, or write them with force (--force)",
        code="range", field="weights", value=sum(spoilt.values()), expected="finite values",
    )  # fmt: skip


@dataclass(frozen=True)
class Exports(Tabular):
    """Result of the check which published classes can hold a model, with the parts that block the others.

    Attributes
    ----------
    name : str
        Text or path that names the model, or the class of its value.
    config : ModelConfig
        The model.
    """

    name: str
    config: ModelConfig

    @cached_property
    def targets(self) -> list[ExportTarget]:
        """All families of published models as export targets: supported ones first, then by number of blockers."""
        return export_targets(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Returns name and targets as plain values."""
        return {"name": self.name, "exports": self.records()}

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each family of published models: supported ones first, then by number of blockers."""
        return [
            {"model_type": one.family.model_type, "class": one.family.architecture, "supported": one.supported,
             "runs_in": runs_in(self.config, one.family) if one.supported else [],
             "blocked_by": {path: list(both) for path, both in one.blockers.items()}}
            for one in self.targets
        ]  # fmt: skip

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields a line for each family of published models that can hold the model, or for the nearest families with
        their blockers."""
        supported = [one for one in self.targets if one.supported]
        for one in supported:
            tools = ", ".join(runs_in(self.config, one.family))
            yield f"exports as {one.family.architecture_of(self.config)}; runs in {tools}: yes"
        if supported:
            return
        yield f"no Hugging Face class holds {self.name}; it loads through the glassformer package:"
        loader = auto_class(self.config)[0]
        yield f"gf.save writes a folder that {loader}.from_pretrained loads after `import glassformer`"
        for one in self.targets[:SHOWN_TARGETS]:
            blockers = list(one.blockers.items())
            words = [
                f"{path}={mine}" + ("" if theirs is None else f" ({theirs} would be supported)")
                for path, (mine, theirs) in blockers[:SHOWN_BLOCKERS]
            ]
            more = len(blockers) - len(words)
            rest = f"; and {more} more" if more > 0 else ""
            yield f"  {one.family.architecture} is blocked by {'; '.join(words)}{rest}"
