"""Jamba: `JambaForCausalLM`. Layers of Mamba with inner norms, with attention without positions in every n-th layer,
and experts in every n-th."""

from __future__ import annotations

from typing import Any

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import heads, read_model
from glassformer.conversion.family import Blocked, Family, ffn
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import EachExpert, Names
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, MambaConfig, MixerConfig
from glassformer.parts.norm import RMSNormConfig

NAMES = Names(
    "model.layers.*.",
    {
        "embedding": "model.embed_tokens",
        ".mixer": "mamba",
        ".mixer.in_proj": "mamba.in_proj",
        ".mixer.conv1d": "mamba.conv1d",
        ".mixer.x_proj": "mamba.x_proj",
        ".mixer.dt_proj": "mamba.dt_proj",
        ".mixer.dt_norm": "mamba.dt_layernorm",
        ".mixer.B_norm": "mamba.b_layernorm",
        ".mixer.C_norm": "mamba.c_layernorm",
        ".mixer.out_proj": "mamba.out_proj",
        ".mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        ".mixer.output": "self_attn.o_proj",
        ".ffn.router": "feed_forward.router",
        **{
            f".ffn.{name}_proj": EachExpert(f"feed_forward.experts.#.{name}_proj", f"feed_forward.{name}_proj")
            for name in ("gate", "up", "down")
        },
        ".residual.mixer_norm": "input_layernorm",
        ".residual.ffn_norm": "pre_ff_layernorm",
        "final_norm": "model.final_layernorm",
        "head": "lm_head",
    },
    prefix="model.",
    wholes={".ffn": "feed_forward"},
)


def read(fields: Fields) -> ModelConfig:
    fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters")  # its attention has no positions
    fields.ignore("router_aux_loss_coef", "output_router_logits", "sliding_window", "layers_block_type", "layer_types")
    eps = fields.number("rms_norm_eps", 1e-6)
    rank = None if fields.get("mamba_dt_rank", "auto") == "auto" else fields.whole("mamba_dt_rank")
    mamba = MambaConfig(
        d_state=fields.whole("mamba_d_state", 16),
        d_conv=fields.whole("mamba_d_conv", 4),
        expand=fields.whole("mamba_expand", 2),
        dt_rank=rank,
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        norm_eps=eps,
    )
    attention = AttentionConfig(
        n_heads=fields.whole("num_attention_heads"), n_kv_heads=fields.whole("num_key_value_heads", None)
    )
    fields.only("hidden_act", "silu", "swish")  # also of the convolution
    hidden = fields.whole("intermediate_size")
    dense = GluConfig(hidden=hidden)
    n_experts = fields.whole("num_experts", 16)
    experts = dense if n_experts == 1 else ExpertsConfig(
        hidden=hidden, n_experts=n_experts, top_k=fields.whole("num_experts_per_tok", 2),
        normalised=False,
    )  # fmt: skip
    if n_experts == 1:
        fields.ignore("num_experts_per_tok")
    norm, attends, routed = RMSNormConfig(eps=eps), _every(fields, "attn", (8, 4)), _every(fields, "expert", (2, 1))

    def block(i: int) -> BlockConfig:
        mixer: MixerConfig = attention if i % attends[0] == attends[1] else mamba
        network: FFNConfig = experts if i % routed[0] == routed[1] else dense
        return BlockConfig(mixer=mixer, ffn=network, norm=norm)

    blocks = [block(i) for i in range(fields.layers("num_hidden_layers"))]
    context = fields.whole("max_position_embeddings", 262144)
    return read_model(fields, context, blocks[0], HeadConfig(tied=False), stack=stack_of(blocks))


def _every(fields: Fields, what: str, default: tuple[int, int]) -> tuple[int, int]:
    """Returns (period, offset) of the layers i of one kind, i % period == offset, from the fields `what`_layer_period
    and `what`_layer_offset."""
    period = fields.whole(f"{what}_layer_period", default[0])
    offset = fields.number(f"{what}_layer_offset", default[1])
    if offset != int(offset) or not 0 <= offset < period:
        raise fields.refuse(
            f"{what}_layer_offset", offset, f"expected a whole number below {what}_layer_period={period}"
        )
    return period, int(offset)


def write(config: ModelConfig) -> dict[str, Any]:
    blocks = list(config.layers())
    attention = next((b.mixer for b in blocks if isinstance(b.mixer, AttentionConfig)), None)
    mamba = next((b.mixer for b in blocks if isinstance(b.mixer, MambaConfig)), None)
    if mamba is None:
        raise Blocked({"mixer.kind": blocks[0].mixer.kind})
    experts = next((b.ffn for b in blocks if isinstance(b.ffn, ExpertsConfig)), None)
    attends = [isinstance(b.mixer, AttentionConfig) for b in blocks]
    routed = [isinstance(b.ffn, ExpertsConfig) for b in blocks]
    network = ffn(blocks[0])
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": network.hidden,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.head.tied,
        "rms_norm_eps": blocks[0].norm.eps,
        "hidden_act": "silu",
        **({"num_attention_heads": 1, "num_key_value_heads": 1} if attention is None else _heads(attention)),
        "mamba_d_state": mamba.d_state,
        "mamba_d_conv": mamba.d_conv,
        "mamba_expand": mamba.expand,
        "mamba_dt_rank": mamba.dt_rank,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "num_experts": 1 if experts is None else experts.n_experts,
        "num_experts_per_tok": 1 if experts is None else experts.top_k,
        **_periods("attn", attends),
        **_periods("expert", routed),
    }


def _heads(attention: AttentionConfig) -> dict[str, Any]:
    return {name: value for name, value in heads(attention).items() if name != "head_dim"}


def _periods(what: str, these: list[bool]) -> dict[str, int]:
    """Returns the fields of the shortest period with an offset that selects the layers i with `these[i]`; if no period
    fits or no layer is selected, an offset beyond the last layer."""
    n = len(these)
    found = next(
        ((period, offset) for period in range(1, n + 2) for offset in range(period)
         if these == [i % period == offset for i in range(n)]), (n + 1, n),
    )  # fmt: skip
    return {f"{what}_layer_period": found[0], f"{what}_layer_offset": found[1]}


FAMILY = Family("jamba", "JambaForCausalLM", NAMES, read, write)
