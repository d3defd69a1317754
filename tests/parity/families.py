"""The published models: what their config.json says, and what Hugging Face calls their weights.

`pair` makes a preset and its Hugging Face model at one tiny size with the same random weights. The other side
follows the published fields and nothing of the preset, so a wrong number in a preset shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import glassformer as gf
from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.model import Model
from glassformer.naming.changes import each_block
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.visibility import SlidingWindowConfig

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@dataclass(frozen=True)
class Family:
    """Our module -> theirs; a name with a leading dot is inside a layer, several are stacked by rows."""

    layer: str
    names: dict[str, str]
    grouped: bool = False
    """Their fused qkv holds, for each key/value head, its queries, its key, its value."""
    transposed: bool = False
    """Their matrices are stored (in, out)."""


_LLAMA = {
    "embedding": "model.embed_tokens",
    ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    ".mixer.output": "self_attn.o_proj",
    ".ffn.gate_proj": "mlp.gate_proj",
    ".ffn.up_proj": "mlp.up_proj",
    ".ffn.down_proj": "mlp.down_proj",
    ".residual.mixer_norm": "input_layernorm",
    ".residual.ffn_norm": "post_attention_layernorm",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_GPT2 = {
    "embedding": "transformer.wte",
    "embedding.position": "transformer.wpe",
    ".mixer.qkv": "attn.c_attn",
    ".mixer.output": "attn.c_proj",
    ".ffn.up_proj": "mlp.c_fc",
    ".ffn.down_proj": "mlp.c_proj",
    ".residual.mixer_norm": "ln_1",
    ".residual.ffn_norm": "ln_2",
    "final_norm": "transformer.ln_f",
}
_BLOOM = {
    "embedding": "transformer.word_embeddings",
    "embedding.norm": "transformer.word_embeddings_layernorm",
    ".mixer.qkv": "self_attention.query_key_value",
    ".mixer.output": "self_attention.dense",
    ".ffn.up_proj": "mlp.dense_h_to_4h",
    ".ffn.down_proj": "mlp.dense_4h_to_h",
    ".residual.mixer_norm": "input_layernorm",
    ".residual.ffn_norm": "post_attention_layernorm",
    "final_norm": "transformer.ln_f",
}
_NEOX = {
    "embedding": "gpt_neox.embed_in",
    ".mixer.qkv": "attention.query_key_value",
    ".mixer.output": "attention.dense",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "lm_head",
}
_FALCON_40B = {".residual.mixer_norm": "ln_attn", ".residual.ffn_norm": "ln_mlp"}
_MPT = {
    "embedding": "transformer.wte",
    ".mixer.qkv": "attn.Wqkv",
    ".mixer.output": "attn.out_proj",
    ".ffn.up_proj": "ffn.up_proj",
    ".ffn.down_proj": "ffn.down_proj",
    ".residual.mixer_norm": "norm_1",
    ".residual.ffn_norm": "norm_2",
    "final_norm": "transformer.norm_f",
}
_QWEN3 = {".mixer.qk_norm.q_norm": "self_attn.q_norm", ".mixer.qk_norm.k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    ".residual.mixer_post_norm": "post_attention_layernorm",
    ".residual.ffn_norm": "pre_feedforward_layernorm",
    ".residual.ffn_post_norm": "post_feedforward_layernorm",
}
_PHI = {
    ".mixer.output": "self_attn.dense",
    ".ffn.up_proj": "mlp.fc1",
    ".ffn.down_proj": "mlp.fc2",
    "final_norm": "model.final_layernorm",
}
_MAMBA = {
    "embedding": "backbone.embeddings",
    ".mixer": "mixer",
    **{f".mixer.{name}": f"mixer.{name}" for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")},
    ".residual.mixer_norm": "norm",
    "final_norm": "backbone.norm_f",
}
_GPT1 = {"embedding": "transformer.tokens_embed", "embedding.position": "transformer.positions_embed"}

FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family("transformer.h.*.", _GPT2, transposed=True),
    "LlamaForCausalLM": Family("model.layers.*.", _LLAMA),
    "MistralForCausalLM": Family("model.layers.*.", _LLAMA),
    "Qwen3ForCausalLM": Family("model.layers.*.", _LLAMA | _QWEN3),
    "BloomForCausalLM": Family("transformer.h.*.", _BLOOM, grouped=True),
    "FalconForCausalLM": Family("transformer.h.*.", _BLOOM, grouped=True),
    "FalconForCausalLM 40b": Family("transformer.h.*.", _BLOOM | _FALCON_40B, grouped=True),
    "GPTNeoXForCausalLM": Family("gpt_neox.layers.*.", _BLOOM | _NEOX, grouped=True),
    "MptForCausalLM": Family("transformer.blocks.*.", _MPT),
    "Gemma2ForCausalLM": Family("model.layers.*.", _LLAMA | _GEMMA2),
    "PhiForCausalLM": Family("model.layers.*.", _LLAMA | _PHI),
    "MambaForCausalLM": Family("backbone.layers.*.", _MAMBA),
    "OpenAIGPTLMHeadModel": Family("transformer.h.*.", _GPT2 | _GPT1, transposed=True),
}


Published = tuple[str, dict[str, Any]]
"""A family, and the fields of a config.json that decide what the model computes."""


# fmt: off
def _says(family: str, **fields: Any) -> Published:
    return family, fields


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _gpt2(layers: int, width: int, heads: int) -> Published:
    return _says(
        "GPT2LMHeadModel", n_layer=layers, n_embd=width, n_head=heads, n_positions=1024, vocab_size=50257,
        activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
    )


def _llama(
    layers: int, width: int, hidden: int, heads: int, vocab: int, context: int, eps: float, theta: float,
    family: str = "LlamaForCausalLM", tied: bool = False, **more: Any,
) -> Published:
    return _says(
        family, num_hidden_layers=layers, hidden_size=width, intermediate_size=hidden,
        num_attention_heads=heads, vocab_size=vocab, max_position_embeddings=context, hidden_act="silu",
        rms_norm_eps=eps, rope_parameters=_rope(theta), tie_word_embeddings=tied, **more,
    )


def _qwen3(layers: int, width: int, hidden: int, heads: int, tied: bool) -> Published:
    return _llama(
        layers, width, hidden, heads, 151936, 40960, 1e-6, 1e6, family="Qwen3ForCausalLM", tied=tied,
        num_key_value_heads=8, head_dim=128, attention_bias=False,
    )


def _bloom(layers: int, width: int, heads: int) -> Published:
    return _says(
        "BloomForCausalLM", n_layer=layers, hidden_size=width, n_head=heads, vocab_size=250880,
        layer_norm_epsilon=1e-5, apply_residual_connection_post_layernorm=False, tie_word_embeddings=True,
    )


def _falcon(family: str, layers: int, width: int, heads: int, **more: Any) -> Published:
    return _says(
        family, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=65024,
        max_position_embeddings=2048, alibi=False, bias=False, parallel_attn=True, multi_query=True,
        activation="gelu", layer_norm_epsilon=1e-5, rope_parameters=_rope(1e4), tie_word_embeddings=True,
        **more,
    )


def _neox(layers: int, width: int, heads: int, vocab: int, activation: str) -> Published:
    return _says(
        "GPTNeoXForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, vocab_size=vocab, max_position_embeddings=2048,
        hidden_act=activation, layer_norm_eps=1e-5, rope_parameters=_rope(1e4, partial_rotary_factor=0.25),
        use_parallel_residual=True, attention_bias=True, tie_word_embeddings=False,
    )


PUBLISHED: dict[str, Published] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": _llama(32, 4096, 11008, 32, 32000, 2048, 1e-6, 1e4),
    "llama-13b": _llama(40, 5120, 13824, 40, 32000, 2048, 1e-6, 1e4),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 32000, 4096, 1e-5, 1e4, num_key_value_heads=8),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 128256, 8192, 1e-5, 5e5, num_key_value_heads=8),
    "smollm2-135m": _llama(30, 576, 1536, 9, 49152, 8192, 1e-5, 1e5, tied=True, num_key_value_heads=3),
    "mistral-7b": _llama(
        32, 4096, 14336, 32, 32000, 32768, 1e-5, 1e4, family="MistralForCausalLM",
        num_key_value_heads=8, sliding_window=4096,
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-7b1": _bloom(30, 4096, 32),
    "falcon-7b": _falcon("FalconForCausalLM", 32, 4544, 71),
    "falcon-40b": _falcon(
        "FalconForCausalLM 40b", 60, 8192, 128, num_kv_heads=8, new_decoder_architecture=True
    ),
    "gpt-neox-20b": _neox(44, 6144, 64, 50432, "gelu_fast"),
    "pythia-160m": _neox(12, 768, 12, 50304, "gelu"),
    "mpt-7b": _says(
        "MptForCausalLM", n_layers=32, d_model=4096, n_heads=32, vocab_size=50432, max_seq_len=2048,
        expansion_ratio=4, attn_config={"alibi": True, "alibi_bias_max": 8}, layer_norm_epsilon=1e-5,
        no_bias=True, tie_word_embeddings=True,
    ),
    "mamba-130m": _says(
        "MambaForCausalLM", num_hidden_layers=24, hidden_size=768, vocab_size=50280, state_size=16, conv_kernel=4,
        expand=2, time_step_rank="auto", use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
    ),
}

# Published wirings that the grammar names and no preset has; `theirs` fills in the sizes. The caps are far
# below the published 50 and 30, so that they bend the scores of a tiny model.
_SIZES = dict.fromkeys(
    ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
     "max_position_embeddings")
)
COMPOSED: dict[str, Published] = {
    "gemma-2": _says(
        "Gemma2ForCausalLM", **_SIZES, num_key_value_heads=None, head_dim=None, sliding_window=None,
        layer_types=["sliding_attention", "full_attention"], rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=64, attn_logit_softcapping=2.0,
        final_logit_softcapping=0.2, rope_parameters=_rope(1e4), tie_word_embeddings=True,
    ),
    "phi-2": _says(
        "PhiForCausalLM", **_SIZES, hidden_act="gelu_new", layer_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=_rope(1e4, partial_rotary_factor=0.5),
    ),
    "gpt-1": _says(
        "OpenAIGPTLMHeadModel", n_layer=None, n_embd=None, n_head=None, n_positions=None, vocab_size=None,
        afn="gelu", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
    ),
}
# fmt: on
EXPRESSIONS = {
    "gemma-2": "llama-7b+gqa:8+head_dim=256+tied+sandwich+norm.unit_offset=true+ffn.activation=gelu_tanh"
    "+mixer.scale=0.125+embedding.scale=64+softcap:2+head.softcap=0.2",
    "phi-2": "gpt-neox-20b+parallel+position.fraction=0.5+head.bias=true",
    "gpt-1": "gpt2+post",
}

# What a size is called in a config.json.
ROLES = {
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers"), "layers"),
    **dict.fromkeys(("n_embd", "d_model", "hidden_size"), "d"),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), "n"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), "g"),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len"), "context"),
    "state_size": "p",
    "conv_kernel": "conv",
    "head_dim": "h",
    "intermediate_size": "f",
    "sliding_window": "window",
    "vocab_size": "vocab",
}


@dataclass(frozen=True)
class Tiny:
    """A size at which everything a preset does still matters: the window and ALiBi's odd heads too."""

    d: int
    n: int
    g: int
    layers: int = 2
    h: int = 12
    context: int = 64
    window: int = 5
    vocab: int = 97
    p: int = 16
    conv: int = 4

    @property
    def f(self) -> int:
        return 4 * self.d


TINY = [Tiny(d=64, n=4, g=2), Tiny(d=48, n=6, g=3), Tiny(d=40, n=5, g=1)]


def shrink(config: ModelConfig, size: Tiny) -> ModelConfig:
    """Returns a config of the same parts in the sizes of `size`."""

    def heads(mixer: Any) -> Any:
        groups = mixer.n_kv_heads if mixer.n_kv_heads in (None, 1) else size.g
        windowed = isinstance(mixer.visibility, SlidingWindowConfig)
        return mixer.replace(
            n_heads=size.n,
            n_kv_heads=groups,
            head_dim=mixer.head_dim and size.h,
            visibility=SlidingWindowConfig(window=size.window) if windowed else mixer.visibility,
        )

    blocks = tuple(
        block.replace(ffn=block.ffn and block.ffn.replace(hidden=size.f)) for block in config.stack[0].blocks
    )
    assert len(config.stack) == 1
    scale = config.embedding.scale and size.d**0.5
    config = config.replace(
        vocab_size=size.vocab,
        d_model=size.d,
        context=size.context,
        embedding=config.embedding.replace(scale=scale),
        stack=(Stage(repeat=size.layers // len(blocks), blocks=blocks),),
    )

    def fit(block: BlockConfig) -> BlockConfig:
        return block.replace(mixer=heads(block.mixer)) if isinstance(block.mixer, AttentionConfig) else block

    return each_block(config, fit)


def published(name: str, change: str = "") -> ModelConfig:
    """Our config of the full size; `change` is added to the expression."""
    config = gf.preset(EXPRESSIONS.get(name, name) + change)
    if name != "gemma-2":
        return config
    block = config.stack[0].blocks[0]  # Gemma 2 alternates windows with the whole
    local = block.replace(mixer=block.mixer.replace(visibility=SlidingWindowConfig(window=4096)))
    return config.replace(stack=(Stage(repeat=13, blocks=(local, block)),))


def theirs(name: str, size: Tiny, seed: int) -> nn.Module:
    """The Hugging Face model with random weights in every parameter, norms and biases included."""
    family, fields = (PUBLISHED | COMPOSED)[name]
    fields = {key: getattr(size, ROLES[key]) if key in ROLES else value for key, value in fields.items()}
    cls = getattr(transformers, family.split()[0])
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = cls(cls.config_class(**fields, **special, attn_implementation="eager")).eval()
    draw = torch.Generator().manual_seed(seed)
    # A quiet stream lets eps speak; loud branches let the activation and the pattern of attention speak.
    quiet = r"embed|wte|wpe|c_proj|o_proj|dense\.|dense_4h_to_h|down_proj|out_proj|fc2"
    if name.startswith("qwen3"):
        quiet += "|q_proj|k_proj"  # a norm follows them too
    for path, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        if re.search(quiet, path):
            noise *= 0.01
        elif weight.dim() == 2:
            noise *= 2.0 / size.d**0.5
        else:
            noise = noise * 0.3 + path.endswith("weight")
        weight.data.copy_(noise)
    return model


def translate(model: Model, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights, or their gradients, under our names; each of theirs is used once."""
    family = FAMILIES[(PUBLISHED | COMPOSED)[name][0]]
    made, used = {}, []
    for path, _ in model.named_parameters():
        module, leaf = path.rsplit(".", 1)
        layer = re.match(r"layers\.(\d+)(.*)", module)
        stem = family.layer.replace("*", layer[1]) if layer else ""
        names = [f"{stem}{one}.{leaf}" for one in family.names[layer[2] if layer else module].split()]
        parts = [tensors[one] for one in names]
        if family.transposed and layer:
            parts = [part.T if part.dim() == 2 else part for part in parts]
        if family.grouped and module.endswith("qkv"):
            mixer = model.layers[0].mixer
            fused = parts[0].unflatten(0, (mixer.n_kv_heads, -1, mixer.head_dim))
            parts = [part.flatten(0, 2) for part in (fused[:, :-2], fused[:, -2:-1], fused[:, -1:])]
        made[path] = torch.cat(parts)
        used += names
    assert sorted(used) == sorted(tensors)
    return made


def ours(name: str, size: Tiny, weights: dict[str, Tensor], change: str = "") -> Model:
    """Our model with their weights; `change` alters it."""
    model = shrink(published(name, change), size).build(seed=None).eval()
    model.load_state_dict(translate(model, name, weights), strict=True)
    return model


def pair(name: str, size: Tiny, seed: int = 0, change: str = "") -> tuple[Model, nn.Module]:
    other = theirs(name, size, seed)
    return ours(name, size, {path: weight.detach() for path, weight in other.named_parameters()}, change), other


def close(actual: Tensor, expected: Tensor, tolerance: float = 3e-5) -> None:
    """Equal to `tolerance`, relative to the largest value; fp32 noise here stays below 1e-5."""
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)
