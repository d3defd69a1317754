"""Checkpoints by name: location, reading, changes and writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from glassformer.config import ModelConfig
from glassformer.conversion import originals
from glassformer.conversion.families.own import OWN
from glassformer.conversion.family import Family
from glassformer.conversion.folder import FILES, read_folder, write_folder
from glassformer.conversion.folder import read_config as read_folder_config
from glassformer.conversion.heads import OfHeads, mean, new, regroup
from glassformer.conversion.storage import is_gguf, means_weights, open_tensors
from glassformer.conversion.weights import fold
from glassformer.errors import RequestError
from glassformer.files import output, unfinished
from glassformer.generation.vectors import Pooling
from glassformer.introspection import eager
from glassformer.loaded import Loaded
from glassformer.machine.threads import LOADING, paced
from glassformer.model import Model
from glassformer.names.known import PACKAGED
from glassformer.names.places import (
    FOLDER_WEIGHTS,
    TORCH,
    existing,
    hub_name,
    is_folder,
    no_config,
    no_tokenizer,
    packaged,
    unknown,
)
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear
from glassformer.parts.quantized import quantize
from glassformer.text import Tokenizer, load_tokenizer
from glassformer.typed import typed


def is_checkpoint(name: str) -> bool:
    """Returns True if `name` means weights: a run, a folder with a config.json or a params.json, a .gguf file,
    nanoGPT's ckpt.pt, hf:owner/name, smollm2."""
    if name.startswith("hf:") or name in PACKAGED:
        return True
    path = Path(name)
    try:
        return is_folder(path) or (path / "latest").is_file() or is_gguf(path) or originals.is_original(path)
    except (OSError, ValueError):  # too long, or not a valid name
        return False


def locate(name: str, weights: bool = True) -> Path:
    """Returns the path of a checkpoint by its name, downloaded for hf:owner/name; without `weights`, only its config.
    Raises RequestError if it does not exist."""
    if name in PACKAGED:
        return packaged(name)
    if name.startswith("hf:"):
        return snapshot(name, weights)
    path = existing(name)
    if path is None:
        raise unknown(name, weights=True)
    return path


def read_config(name: str) -> ModelConfig:
    """Returns the config of the named checkpoint, without reading its weights. Raises RequestError."""
    path = locate(name, weights=False)
    if path.is_dir() and is_folder(path):
        return read_folder_config(path)[1]
    if originals.is_original(path):
        return originals.read_config(path)
    if path.is_dir():
        return ModelConfig.from_file(path / "config.yaml")
    from glassformer.conversion.gguf import read_config as read_gguf_config

    return read_gguf_config(path)


def read_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of the named checkpoint, or of a tokenizer.json, without reading weights. Raises
    RequestError if the checkpoint has no tokenizer."""
    path = locate(name, weights=False)
    if not is_gguf(path):
        return load_tokenizer(path)
    from glassformer.conversion.gguf import read_tokenizer as read_gguf_tokenizer

    found = read_gguf_tokenizer(path)
    if found is None:
        raise no_tokenizer()
    return found


def read_checkpoint(path: Path, dtype: torch.dtype | None, device: Any, keep: bool) -> Loaded:
    """Returns the model, ready to run, of a Hugging Face folder, a .gguf file, or a checkpoint in its authors' format.
    With `keep`, quantised weights of a .gguf stay quantised. Raises RequestError."""
    if path.is_dir() and is_folder(path):
        return read_folder(path, dtype, device)
    if originals.is_original(path):
        return originals.read_original(path, dtype, device)
    if path.is_dir() or not is_gguf(path):
        _refuse(path)
    from glassformer.conversion.gguf import read_gguf

    return read_gguf(path, dtype, device, keep)


def pack(loaded: Loaded, kind: str, dtype: torch.dtype | None) -> None:
    """Quantises the model's matrices to the format `kind`, in place; all other weights become `dtype`, or keep theirs
    for None."""
    loaded.model = fold(loaded.model)
    loaded.config = loaded.model.config
    with paced(LOADING, f"packing {kind}", loaded.config.num_params()):
        quantize(loaded.model, kind).to(dtype=dtype)


def refuse_weights(path: Path) -> None:
    """Raises RequestError if `path` holds weights without a readable config, or is a folder whose writing was
    interrupted; the message names the format."""
    if (path / "config.yaml").is_file():
        return
    if path.is_dir() and unfinished(path):
        raise no_config(path)
    if means_weights(path):
        _refuse(path)


def _refuse(path: Path) -> NoReturn:
    with open_tensors(path):  # names the format of a known kind of file
        raise no_config(path)


def adapt(loaded: Loaded, config: ModelConfig, heads: OfHeads = mean) -> Loaded:
    """Returns the loaded weights in a model of another config; parameters that are missing or of another shape are
    newly initialised.

    A different number of KV heads is made from the loaded ones by `heads` (`conversion/heads.py`). Reparametrised
    matrices are folded first, and those of the new model are initialised from the loaded weights."""
    before = fold(loaded.model)
    old = dict(before.named_parameters())
    example = next(iter(old.values()))
    model = config.build(seed=0).to(example.device, example.dtype)
    fitting = {
        name: old[name].detach()
        for name, new in model.named_parameters()
        if name in old and old[name].shape == new.shape
    }
    made = regroup(before, model, heads)
    fitting |= made
    model.load_state_dict(fitting, strict=False, assign=True)
    begun: set[str] = set()  # parameters derived from an existing weight
    for path, module in model.named_modules():
        if isinstance(module, (Linear, Head)) and (reparam := module.reparam) is not None and module.weight is not None:
            reparam.begin(module.weight)
            if f"{path}.weight" in fitting:
                begun |= {f"{path}.reparam.{name}" for name, _ in reparam.named_parameters()}
    kept = {*fitting, *begun} - (made.keys() if heads is new else set())
    fresh = tuple(name for name, _ in model.named_parameters() if name not in kept)
    regrouped = () if heads is new else tuple(made)
    return replace(loaded, model=model.eval(), config=config, fresh=fresh, regrouped=regrouped)


@typed
def save(
    model: Model,
    tokenizer: Tokenizer | None,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    trained: dict[str, Any] | None = None,
    family: str | None = None,
    ends: Sequence[int] | None = None,
    generation: Mapping[str, Any] | None = None,
    pooling: Pooling | None = None,
    force: bool = False,
) -> Family:
    """Writes a Hugging Face folder and returns the family that holds the model; `gf.save` explains the parameters."""
    with output(folder, *FILES, force=force, alone=True) as place:
        model = eager(model)
        ends = model.ends if ends is None else ends
        return write_folder(fold(model), tokenizer, place, dtype, trained, family, ends, generation, pooling)


WANTED = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
          "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip
OF_TORCH = [TORCH, "pytorch_model-*.bin", f"{TORCH}.index.json"]
"""Weight files that are downloaded if a model has no safetensors."""
INSTEAD = "pass a folder, a .gguf file, or a run instead"


def snapshot(name: str, weights: bool = True) -> Path:
    """Returns the folder of `hf:owner/name[@revision]`, downloaded if the cache lacks it; without `weights`, only its
    config. Raises RequestError, also offline."""
    owned, revision = hub_name(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise RequestError(
            f"{name} needs the package huggingface-hub (pip install 'glassformer[hub]'); or {INSTEAD}",
            code="missing", field="huggingface_hub",
        ) from None  # fmt: skip
    wanted = WANTED if weights else WANTED[:1]
    try:
        folder = Path(snapshot_download(owned, revision=revision, allow_patterns=wanted))
        if weights and not any((folder / file).exists() for file in FOLDER_WEIGHTS):
            folder = Path(snapshot_download(owned, revision=revision, allow_patterns=[*wanted, *OF_TORCH]))
        return folder
    except Exception as problem:  # errors of the library, of its network library, and of the system
        why = (str(problem).splitlines() or [type(problem).__name__])[0][:160]
        raise RequestError(
            f"{name} cannot be had from the Hub ({why}); {INSTEAD}", code="missing", field="model", value=name
        ) from None


Format = Literal["hf", "gguf"]

VLLM = frozenset({
    "BloomForCausalLM", "CohereForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM",
    "MistralForCausalLM", "MixtralForCausalLM", "MptForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM",
    "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM",
})  # fmt: skip
"""Text-generation classes that vLLM registers, of those that this package writes: `_TEXT_GENERATION_MODELS` in vLLM's
vllm/model_executor/models/registry.py at commit 0002bff."""


def runs_in(config: ModelConfig, family: Family, written: Format | None = None) -> list[str]:
    """Returns the names of tools that load the model in the format `written`: "hf" for a folder, "gguf" for a file,
    None for every format that can hold it.

    vLLM counts if it registers the family's class, whatever the fields are; llama.cpp if a GGUF of the model, read
    back, gives an equal config."""
    from glassformer.conversion.gguf import llama_cpp

    file = ["llama.cpp"] if written != "hf" and llama_cpp(config).supported else []
    if written == "gguf":
        return file
    if family is OWN:
        return ["glassformer", "transformers (after import glassformer)"]
    return ["transformers", *(["vLLM"] if family.architecture_of(config) in VLLM else []), *file]
