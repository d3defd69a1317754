"""Checkpoints in formats of their authors, not converted to a Hugging Face folder.

    FILE.pt     nanoGPT's ckpt.pt: `model_args` and the state dict `model`
    FOLDER      Meta's: params.json, consolidated.00.pth and those of more ranks, tokenizer.model
    FOLDER      Mistral's: params.json, consolidated.safetensors or several files, tokenizer.model.v3 or tekken.json

Files of torch are read without unpickling (`storage/pickled.py`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glassformer.config import ModelConfig, read_tree, stack_of
from glassformer.conversion.families import gpt2, llama, mistral
from glassformer.conversion.families.common import with_modules
from glassformer.conversion.family import Family, attention, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import Names, Paired
from glassformer.conversion.storage import CutFile, ManyFiles, PickledFile, SafetensorsFile, SingleFile, TensorFile
from glassformer.conversion.weights import fill
from glassformer.errors import RequestError
from glassformer.loaded import Loaded
from glassformer.names.places import PARAMS, has_params, is_zip
from glassformer.parts.norm import LayerNormConfig
from glassformer.text import Tokenizer, load_tokenizer
from glassformer.text.tokenizers import TOKENIZER_FILES

ARGUMENTS = "model_args."
"""Prefix of the keys of a checkpoint of nanoGPT that describe its model."""
WRAPPED = ("module.", "_orig_mod.")
"""Prefixes that `DistributedDataParallel` and `torch.compile` add to the names of a state dict."""
NANOGPT = replace(
    with_modules(
        gpt2.NAMES,
        {
            ".mixer.qkv": "attn.c_attn",
            ".mixer.output": "attn.c_proj",
            ".ffn.up_proj": "mlp.c_fc",
            ".ffn.down_proj": "mlp.c_proj",
        },
    ),
    ignored=r"transformer\.h\.\d+\.attn\.bias",
)
CONSOLIDATED = Names(
    "layers.*.",
    {
        "embedding": "tok_embeddings",
        ".mixer.qkv": Paired("attention.wq", "attention.wk", "attention.wv"),
        ".mixer.output": "attention.wo",
        ".ffn.gate_proj": "feed_forward.w1",
        ".ffn.up_proj": "feed_forward.w3",
        ".ffn.down_proj": "feed_forward.w2",
        ".residual.mixer_norm": "attention_norm",
        ".residual.ffn_norm": "ffn_norm",
        "final_norm": "norm",
        "head": "output",
    },
    ignored=r"rope\.freqs",
)
WORDS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
"""Key of params.json -> key of the config.json of the same model."""
LLAMA_3_2 = {(2048, 16), (3072, 28)}
"""(width, layers) of the models of Llama 3.2, which divide low frequencies by 32 instead of Llama 3.1's 8."""
CUT = (
    r"output\.weight|.*\.(attention\.w[qkv]|feed_forward\.w[13])\.weight",
    r".*\.(attention\.wo|feed_forward\.w2)\.weight",
)
"""Patterns of the matrices that Meta's ranks divide along their rows, and along their columns (llama/model.py)."""
FOREIGN_TOKENIZERS = {
    "tokenizer.model*": "the folder of the same model on the Hub has one, and transformers' "
    "convert_llama_weights_to_hf.py or convert_mistral_weights_to_hf.py makes one",
    "tekken.json": "the folder of the same model on the Hub has one",
    "meta.pkl": "it is a pickle of nanoGPT's characters, which --tokenizer char of glassformer train on the same text "
    "numbers alike; the tokenizer.json of that run fits",
}
"""Tokenizer files that are not read -> remedy."""
LONGEST = ("max_seq_len", "max_position_embeddings", "model_max_length")
"""Keys of params.json for the longest text; the first existing one counts."""


@dataclass(frozen=True)
class Original:
    """A checkpoint in its authors' format: its config, the names of its modules, and the opened file of its tensors."""

    config: ModelConfig
    names: Names
    file: TensorFile
    folder: Path
    """Folder that may have the tokenizer's files."""


def is_original(path: Path) -> bool:
    """Returns True for a folder with a params.json and consolidated weights, and for a checkpoint of nanoGPT."""
    if path.is_dir():
        return has_params(path)
    if not (path.is_file() and is_zip(path)):
        return False
    try:
        with PickledFile(path) as file:
            return any(key.startswith(ARGUMENTS) for key in file.metadata)
    except RequestError:
        return False


def read_config(path: Path) -> ModelConfig:
    """Returns the config of a checkpoint in its authors' format. Raises RequestError."""
    original = _opened(path)
    original.file.close()
    return original.config


def read_original(path: Path, dtype: torch.dtype | None = None, device: Any = None) -> Loaded:
    """Returns the model of a checkpoint in its authors' format, ready to run, with its tokenizer, None if that cannot
    be read. Raises RequestError."""
    original = _opened(path)
    with original.file as file:
        model = fill(original.config, original.names, file, dtype, device, where=str(path))
    return Loaded(model, model.config, _tokenizer(original.folder))


def _opened(path: Path) -> Original:
    return _consolidated(path) if path.is_dir() else _nanogpt(path)


def _read(family: Family, fields: Fields, said: Fields) -> ModelConfig:
    """Returns the config that `fields` describe as `family`; warns of keys in `said`, the checkpoint's own, that were
    not read."""
    config = family.config(fields)
    if unread := said.unread():
        warnings.warn(f"{said.where} has fields that are not understood and may matter: {', '.join(unread[:8])}")
    return config


# nanoGPT


def _nanogpt(path: Path) -> Original:
    """Opens a checkpoint of nanoGPT's train.py: GPT-2 with exact GELU, with biases or without any.

    Models of nanoGPT before June 2023 used the tanh approximation of GELU, which the file does not record."""
    file = PickledFile(path)
    try:
        arguments = {
            key.removeprefix(ARGUMENTS): one for key, one in file.metadata.items() if key.startswith(ARGUMENTS)
        }
        said = Fields(arguments, f"{path}: model_args", ARGUMENTS)
        theirs = ("vocab_size", "n_layer", "n_head", "n_embd")
        fields = {name: said.whole(name) for name in theirs} | {"n_positions": said.whole("block_size")}
        biased = said.flag("bias", True)
        config = _read(gpt2.FAMILY, Fields({**fields, "activation_function": "gelu"}, str(path)), said)
        weights = {_bare(name): entry for name, entry in file.entries.items() if name.startswith("model.")}
        file.entries = {name: entry._replace(name=name) for name, entry in weights.items()}
    except BaseException:
        file.close()
        raise
    return Original(config if biased else _unbiased(config), NANOGPT, file, path.parent)


def _bare(name: str) -> str:
    """Returns a tensor's name in nanoGPT's model: without "model." and the prefixes of `WRAPPED`."""
    name = name.removeprefix("model.")
    while wrapped := next((one for one in WRAPPED if name.startswith(one)), ""):
        name = name.removeprefix(wrapped)
    return name


def _unbiased(config: ModelConfig) -> ModelConfig:
    """Returns GPT-2's config without the biases of matrices and norms."""
    blocks = []
    for block in config.layers():
        mixer, network = attention(block).replace(bias=False), ffn(block).replace(bias=False)
        blocks.append(block.replace(mixer=mixer, ffn=network, norm=LayerNormConfig(eps=block.norm.eps, bias=False)))
    return config.replace(stack=stack_of(blocks), final_norm=blocks[0].norm)


# Meta and Mistral


def _consolidated(folder: Path) -> Original:
    """Opens a folder of Meta or Mistral with consolidated weights; their rotary positions rotate neighbouring pairs."""
    where = folder / PARAMS
    tree = read_tree(where)
    tree = tree["model"] if isinstance(tree, dict) and isinstance(tree.get("model"), dict) else tree
    said = Fields(tree, str(where))
    file = _weights(folder, said.whole("dim"))
    try:
        fields = _fields(said, file)
        family = mistral.FAMILY if fields["sliding_window"] is not None else llama.FAMILY
        config = _read(family, Fields(fields, str(where)), said)
    except BaseException:
        file.close()
        raise
    return Original(config, CONSOLIDATED, file, folder)


def _fields(said: Fields, file: TensorFile) -> dict[str, Any]:
    """Returns the fields of the config.json equivalent to a params.json, `said`. Raises RequestError for unsupported
    parts."""
    for name in ("moe", "vision_encoder", "quantization", "quantization_args", "lora", "lora_args", "yarn",
                 "llama_4_scaling", "qk_norm", "use_biases", "mla", "ssm"):  # fmt: skip
        said.only(name, None, False)
    said.only("causal", True)
    said.ignore("max_batch_size", "vocab_size")
    fields = {ours: said.get(name) for name, ours in WORDS.items()}
    dim, _ = said.whole("dim"), said.layers("n_layers")
    fields["rms_norm_eps"] = said.number("norm_eps", 1e-5)
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = _hidden(
            dim, said.number("ffn_dim_multiplier", 1.0), said.whole("multiple_of", 256)
        )
    said.ignore("ffn_dim_multiplier", "multiple_of")
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = said.whole("n_heads")
    fields["vocab_size"] = _rows(said, file)
    fields["tie_word_embeddings"] = "output.weight" not in file.entries
    theta, scaled = said.number("rope_theta", 1e4), said.flag("use_scaled_rope", False)
    if scaled:
        factor = 32.0 if (dim, said.whole("n_layers")) in LLAMA_3_2 else 8.0
        fields["rope_scaling"] = {
            "rope_type": "llama3", "factor": said.number("rope_scaling_factor", factor), "low_freq_factor": 1.0,
            "high_freq_factor": said.number("rope_high_freq_factor", 4.0), "original_max_position_embeddings": 8192,
        }  # fmt: skip
    longest = [said.whole(name, None) for name in LONGEST]
    given = next((one for one in longest if one is not None), None)
    fields["max_position_embeddings"] = given or _context(said, theta, scaled)
    return fields


def _hidden(dim: int, multiplier: float, multiple_of: int) -> int:
    """Returns the hidden size of Meta's FFN (llama/model.py).

    >>> _hidden(4096, 1.0, 256), _hidden(4096, 1.3, 1024)
    (11008, 14336)
    """
    return multiple_of * -(-int(multiplier * int(8 * dim / 3)) // multiple_of)


def _rows(said: Fields, file: TensorFile) -> int:
    """Returns the vocabulary size from the embedding's shape, because Meta's params.json leaves it open (-1)."""
    rows = file.entry("tok_embeddings.weight").shape[0]
    given = said.get("vocab_size", -1)
    if given not in (-1, rows):
        raise said.refuse("vocab_size", given, f"tok_embeddings.weight has {rows} rows", "conflict")
    return rows


def _context(said: Fields, theta: float, scaled: bool) -> int:
    """Returns the context length in tokens of the Llama release that these fields match; warns, because no file states
    it."""
    if scaled:
        release, context = "Llama 3.1", 131_072
    elif theta >= 5e5:
        release, context = "Llama 3", 8192
    elif theta > 1e4:
        release, context = "Code Llama", 16_384
    else:
        release, context = ("Llama 1", 2048) if said.number("norm_eps") < 1e-5 else ("Llama 2", 4096)
    warnings.warn(f"{said.where} says no context; that of {release} is taken, {context:,} (another: +context=N)")
    return context


def _weights(folder: Path, dim: int) -> TensorFile:
    """Opens the weights of a folder as one file; several files hold parts of each tensor (.pth of Meta's ranks) or
    whole tensors (.safetensors)."""
    paths = sorted(folder.glob("consolidated*.safetensors")) or sorted(folder.glob("consolidated*.pth"))
    kind: Callable[[Path], SingleFile] = SafetensorsFile if paths[0].suffix == ".safetensors" else PickledFile
    with ExitStack() as opened:
        files = [opened.enter_context(kind(path)) for path in paths]
        whole = _joined(folder, files, dim) if len(files) > 1 else files[0]
        opened.pop_all()
    return whole


def _joined(folder: Path, files: list[SingleFile], dim: int) -> TensorFile:
    """Returns several files of weights as one file. Raises RequestError if they contradict each other."""

    def axis(name: str, shape: tuple[int, ...]) -> int | None:
        if name == "tok_embeddings.weight":  # by vocabulary since Llama 3, before by width
            return 0 if shape[1:] == (dim,) else 1
        return next((axis for axis, names in enumerate(CUT) if re.fullmatch(names, name)), None)

    if files[0].path.suffix == ".pth":
        return CutFile(folder, files, axis)
    homes: dict[str, SingleFile] = {}
    for file in files:
        if twice := sorted(homes.keys() & file.entries.keys()):
            raise RequestError(
                f"{twice[0]} is in {homes[twice[0]].path.name} and in {file.path.name} of {folder}",
                code="conflict", field=f"tensor {twice[0]}",
            )  # fmt: skip
        homes |= dict.fromkeys(file.entries, file)
    return ManyFiles(folder, files, homes, {})


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a folder; None without a readable one, with a warning that tells how to make it."""
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return load_tokenizer(folder)
    for pattern, remedy in FOREIGN_TOKENIZERS.items():
        for path in sorted(folder.glob(pattern)):
            warnings.warn(
                f"{path} is not read, so that the model takes token ids only; put a tokenizer.json next to it: {remedy}"
            )
    return None
