"""A Hugging Face folder: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from glassformer.config import ModelConfig, read_tree
from glassformer.conversion import answers, sentences
from glassformer.conversion.exports import export_target, family_of
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.families.own import OWN
from glassformer.conversion.family import Family
from glassformer.conversion.fields import Fields
from glassformer.conversion.storage import WEIGHT_FILES, open_folder, write_safetensors
from glassformer.conversion.weights import fill, packed_formats, tensors
from glassformer.errors import RequestError, did_you_mean
from glassformer.files import atomic_file, temporary_file
from glassformer.generation.vectors import Pooling
from glassformer.loaded import Loaded
from glassformer.model import Model
from glassformer.text import Tokenizer, load_tokenizer, replace_tokenizer
from glassformer.text.pairs import START, as_read
from glassformer.text.tokenizers import FILES as TOKENIZER_FILES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
SHARD_BYTES = 5_000_000_000
CARD = "README.md"
FILES = (CARD, "config.json", answers.FILE, *WEIGHT_FILES, *TOKENIZER_FILES, *sentences.FILES)
"""Patterns of the files of a folder that are written or removed."""


def read_config(folder: Path) -> tuple[Family, ModelConfig, Fields]:
    """Returns (family, config, fields) of the folder's config.json; warns of unread fields. Raises RequestError for a
    model that cannot be computed exactly."""
    fields = Fields(read_tree(folder / "config.json"), str(folder / "config.json"))
    kind = str(fields.get("model_type"))[:80]
    if kind == "gemma3" and fields.get("text_config"):
        raise RequestError(
            f"{fields.where}: model_type=gemma3 reads images; its text model is gemma3_text",
            code="unsupported", field="model_type", value=kind,
        )  # fmt: skip
    family = ({**FAMILIES, OWN.model_type: OWN}).get(kind)
    if family is None:
        near = did_you_mean(kind, FAMILIES) or f"; known are {', '.join(FAMILIES)}"
        raise RequestError(
            f"{fields.where}: model_type={kind!r} is not a known family{near}",
            code="unknown", field="model_type", value=kind,
        )  # fmt: skip
    if (how := fields.get("quantization_config")) is not None:
        raise fields.refuse("quantization_config", how, "only weights that are not quantised can be read")
    config = family.config(fields)
    fields.only("is_encoder_decoder", config.encoder is not None)
    fields.ignore(*answers.KNOWN, *answers.NEUTRAL, *answers.WITHOUT_EFFECT)  # read with the weights
    if unread := fields.unread():
        warnings.warn(f"{fields.where} has fields that are not understood and may matter: {', '.join(unread[:8])}")
    return family, config, fields


def read_folder(folder: Path, dtype: torch.dtype | None = None, device: Any = None) -> Loaded:
    """Returns the model of a Hugging Face folder, ready to run, without a tokenizer (None) if the folder has no
    tokenizer.json. Weights have `dtype`, or the folder's for None. Raises RequestError."""
    family, config, fields = read_config(folder)
    said = fields.get("dtype") or fields.get("torch_dtype")
    with open_folder(folder) as file:
        model = fill(config, family.names_of(config), file, dtype or DTYPES.get(str(said)), device, where=fields.where)
        unpacked = packed_formats(file)
    ends, settings = answers.read(folder, fields)
    if config.encoder is not None and START not in settings:
        begins = fields.get(START, fields.get(family.start))
        settings |= {START: begins} if answers.KNOWN[START](begins) else {}
    pooling = sentences.read(folder)
    return Loaded(
        model, model.config, _tokenizer(folder), ends=ends, generation=settings, pooling=pooling, unpacked=unpacked
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def write_folder(
    model: Model,
    tokenizer: Tokenizer | None,
    folder: Path,
    dtype: torch.dtype | None = None,
    trained: dict[str, Any] | None = None,
    kind: str | None = None,
    ends: Sequence[int] = (),
    generation: Mapping[str, Any] | None = None,
    pooling: Pooling | None = None,
) -> Family:
    """Writes a folder for `from_pretrained`, as the family `kind` or the first that holds the model; returns the
    family. Raises RequestError.

    config.json is removed when all weights are written, and written last: a folder that has one is complete, and a
    folder that held a model keeps it until then."""
    config: ModelConfig = model.config
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise RequestError(
            f"vocab_size={config.vocab_size} of the model is less than the {tokenizer.vocab_size} tokens of its "
            "tokenizer; save it with the one it was trained with",
            code="conflict", field="vocab_size", value=config.vocab_size,
        )  # fmt: skip
    family, fields = _chosen(config, kind)
    if config.encoder is not None and tokenizer is not None:
        tokenizer = as_read(tokenizer)
    dtype = dtype or next(model.parameters()).dtype
    weights, readme = tensors(model, family.names_of(config), dtype), card(config, family, folder.name, trained)
    with temporary_file(folder / "config.json"):  # removes the remains of a killed process
        begin = partial((folder / "config.json").unlink, missing_ok=True)
        write_safetensors(folder, weights, max_shard_bytes=SHARD_BYTES, by_name=False, before=begin)
        replace_tokenizer(tokenizer, folder)
        sentences.replace(folder, pooling, config.d_model)
        ids = answers.special_ids(tokenizer, ends)
        begins = _begins(family, ids) if config.encoder is not None and tokenizer is not None else {}
        settings = {**begins, **(generation or {})}
        _write_json(folder / answers.FILE, answers.written(ids, ends, settings))
        with atomic_file(folder / CARD) as temporary:
            temporary.write_text(readme, encoding="utf-8")
        said = {
            "architectures": [family.architecture_of(config)],
            "model_type": family.model_type,
            **ids,
            **fields,  # positions that start after the padding's need the family's padding token
            **({START: settings[START]} if START in settings else {}),  # overrides the family's default
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        _write_json(folder / "config.json", said)
    return family


def _begins(family: Family, ids: Mapping[str, int | None]) -> dict[str, int]:
    """Returns {"decoder_start_token_id": id} for a decoder without such a setting: the token that `family` starts with,
    or the end token if the tokenizer lacks it; {} if it lacks both."""
    token = ids["eos_token_id"] if ids[family.start] is None else ids[family.start]
    return {} if token is None else {START: token}


def _chosen(config: ModelConfig, kind: str | None) -> tuple[Family, dict[str, Any]]:
    """Returns (family, its fields of config.json): the family `kind`, or for None the first that holds the config.
    Raises RequestError if the family cannot hold it."""
    if kind in (None, OWN.model_type):
        opened = None if kind else family_of(config)
        return (opened.family, opened.fields) if opened else (OWN, OWN.write(config))
    if kind not in FAMILIES:
        raise RequestError(
            f"{kind!r} is not a known family{did_you_mean(str(kind), FAMILIES)}",
            code="unknown", field="kind", value=kind,
        )  # fmt: skip
    chosen = export_target(config, FAMILIES[kind])
    if not chosen.supported:
        blockers = ", ".join(f"{path}={mine}" for path, (mine, _) in chosen.blockers.items())
        raise RequestError(
            f"{chosen.family.architecture} cannot hold this model: {blockers}",
            code="unsupported", field=next(iter(chosen.blockers)), value=kind,
        )  # fmt: skip
    return chosen.family, chosen.fields


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def card(config: ModelConfig, family: Family, name: str, trained: dict[str, Any] | None = None) -> str:
    """Returns a model card in Markdown with front matter for hubs. `trained` is a record of the training, printed as
    YAML."""
    own = family is OWN
    auto, task = auto_class(config)
    front = {"library_name": "glassformer" if own else "transformers", "pipeline_tag": task,
             "tags": ["glassformer"] if own else ["glassformer", family.model_type]}  # fmt: skip
    load = f"{auto}.from_pretrained(folder)"
    how = f"import glassformer  # registers the class\n{load}" if own else load
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"{config.num_params():,} parameters, {config.n_layers} layers, d_model {config.d_model}, context "
        f"{config.context:,}; stored as `{family.architecture_of(config)}`.",
        f'```python\nfrom transformers import {auto}\n\nfolder = "."  # the folder of this file\n{how}\n\n'
        "import glassformer as gf\ngf.load(folder)\n```",
    ]
    if trained:
        parts.append(f"## Training\n\n```yaml\n{yaml.safe_dump(trained, sort_keys=False)}```")
    parts.append(f"## Config\n\n```yaml\n{config.to_yaml()}```")
    return "\n\n".join(parts) + "\n"


def auto_class(config: ModelConfig) -> tuple[str, str]:
    """Returns (auto class of `transformers` for the config, name of its task on hubs)."""
    if config.encoder is not None:
        return "AutoModelForSeq2SeqLM", "text2text-generation"
    if config.head.predicts_tokens:
        return ("AutoModelForCausalLM", "text-generation") if config.writes else ("AutoModelForMaskedLM", "fill-mask")
    if not config.head.classes:
        return "AutoModel", "feature-extraction"
    if config.embedding.patches is not None:
        return "AutoModelForImageClassification", "image-classification"
    return "AutoModelForSequenceClassification", "text-classification"
