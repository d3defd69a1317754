"""Qwen 3 Next: `Qwen3NextForCausalLM`. Three layers of the gated delta rule to one of attention with an output gate,
and experts with a gated shared one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glassformer.config import BlockConfig, ModelConfig, stack_of
from glassformer.conversion.families.common import FULL, QK_NORM, heads, read_model, read_routing, sizes
from glassformer.conversion.family import Blocked, Family
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import EachExpert, Names, OwnParameter, TensorLayout, TensorPiece
from glassformer.conversion.rope import read_rotary, write_rotary
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import AttentionConfig, GatedDeltaNetConfig, MixerConfig, QKNormConfig
from glassformer.parts.norm import RMSNormConfig

LINEAR = "linear_attention"


def _slice(name: str, rows: tuple[int, int], groups: int, place: tuple[int, int], whole: int, rest: Any) -> TensorPiece:
    """Returns the piece that maps `rows` (first, end) of our parameter, in `groups` equal groups, to the rows `place`
    (first, end) of each group of `whole` rows in the published tensor; `rest`: its other dimensions."""
    first, last = rows

    def ours(w: Tensor) -> Tensor:
        return w[first:last].view(groups, -1, *rest)

    def theirs(w: Tensor) -> Tensor:
        return w.view(groups, whole, *rest)[:, place[0] : place[1]]

    return TensorPiece(name, (groups * whole, *rest), ours, theirs)


class _Queries(TensorLayout):
    """Layout of queries and output gates: the published tensor interleaves them head by head, we have two
    parameters."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        n, g, h, rest = at.mixer.n_heads, at.mixer.n_kv_heads, at.mixer.head_dim, at.shape[1:]
        if len(self.names) == 1:
            return [_slice(self.names[0], (0, n * h), n, (h, 2 * h), 2 * h, rest)]
        kv = [TensorPiece(name, (g * h, *rest), row=(n + i * g) * h) for i, name in enumerate(self.names[1:])]
        return [_slice(self.names[0], (0, n * h), n, (0, h), 2 * h, rest), *kv]


class _Inputs(TensorLayout):
    """Layout of the delta rule's input projection: of two published tensors, the first holds per KV head a query, a
    key, and the values and gates of its value heads, the second their beta and decay."""

    def pieces(self, at: OwnParameter) -> list[TensorPiece]:
        g, outs, made, start = at.mixer.n_heads, at.module.outs, [], 0
        for name, some in zip(self.names, (outs[:4], outs[4:]), strict=True):  # type: ignore[index]
            whole, first = sum(some) // g, 0
            for out in some:
                each = out // g
                made.append(_slice(name, (start, start + out), g, (first, first + each), whole, at.shape[1:]))
                start, first = start + out, first + each
        return made


NAMES = Names(
    "model.layers.*.",
    {
        "embedding": "model.embed_tokens",
        ".mixer": "linear_attn",
        ".mixer.in_proj": _Inputs("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
        ".mixer.conv1d": "linear_attn.conv1d",
        ".mixer.norm": "linear_attn.norm",
        ".mixer.out_proj": "linear_attn.out_proj",
        ".mixer.qkv": _Queries("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ".mixer.gate_proj": _Queries("self_attn.q_proj"),
        **QK_NORM,
        ".mixer.output": "self_attn.o_proj",
        ".ffn.router": "mlp.gate",
        ".ffn.shared_gate": "mlp.shared_expert_gate",
        **{
            f".ffn.{name}_proj": EachExpert(f"mlp.experts.#.{name}_proj", f"mlp.{name}_proj")
            for name in ("gate", "up", "down")
        },
        **{f".ffn.shared.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        ".residual.mixer_norm": "input_layernorm",
        ".residual.ffn_norm": "post_attention_layernorm",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
    prefix="model.",
    apart=frozenset({".mixer.norm"}),
    ignored=r"mtp\..*",
    wholes={".ffn": "mlp"},
)


def read(fields: Fields) -> ModelConfig:
    context, layers = fields.whole("max_position_embeddings", 32768), fields.layers("num_hidden_layers")
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6), unit_offset=True)
    fields.only("hidden_act", "silu", "swish")  # also of the convolution
    attention = AttentionConfig(
        n_heads=fields.whole("num_attention_heads", 16),
        n_kv_heads=fields.whole("num_key_value_heads", 2),
        head_dim=fields.whole("head_dim", 256),
        bias=fields.flag("attention_bias", False),
        position=read_rotary(fields, context, fraction=0.25),
        qk_norm=QKNormConfig(norm=norm),
        gated=True,
    )
    delta = GatedDeltaNetConfig(
        n_heads=fields.whole("linear_num_key_heads", 16),
        head_dim=fields.whole("linear_key_head_dim", 128),
        n_v_heads=fields.whole("linear_num_value_heads", 32),
        v_head_dim=fields.whole("linear_value_head_dim", 128),
        d_conv=fields.whole("linear_conv_kernel_dim", 4),
        norm_eps=norm.eps,
    )
    every = fields.whole("full_attention_interval", 4)
    usual = [FULL if i % every == 0 else LINEAR for i in range(1, layers + 1)]
    kinds = fields.names("layer_types", (LINEAR, FULL), layers) or usual
    dense = GluConfig(hidden=fields.whole("intermediate_size", 5632))
    experts = ExpertsConfig(
        **read_routing(fields, "moe_intermediate_size", n_experts=512, top_k=10, also="num_experts", width=(512,)),
        normalised=fields.flag("norm_topk_prob", True),
        n_shared=1,
        shared_hidden=fields.whole("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    step, plain = fields.whole("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(isinstance(one, int) and 0 <= one < layers for one in plain):
        raise fields.refuse("mlp_only_layers", plain, f"expected a list of integers below num_hidden_layers={layers}")

    def block(i: int) -> BlockConfig:
        mixer: MixerConfig = attention if kinds[i] == FULL else delta
        network: FFNConfig = experts if (i + 1) % step == 0 and i not in plain else dense
        return BlockConfig(mixer=mixer, ffn=network, norm=norm)

    blocks = [block(i) for i in range(layers)]
    return read_model(fields, context, blocks[0], HeadConfig(tied=False), stack=stack_of(blocks))


def write(config: ModelConfig) -> dict[str, Any]:
    blocks = list(config.layers())
    attention = next((b.mixer for b in blocks if isinstance(b.mixer, AttentionConfig)), None)
    delta = next((b.mixer for b in blocks if isinstance(b.mixer, GatedDeltaNetConfig)), None)
    experts = next((b.ffn for b in blocks if isinstance(b.ffn, ExpertsConfig)), None)
    dense = next((b.ffn for b in blocks if isinstance(b.ffn, GluConfig)), None)
    if delta is None and (attention is None or experts is None):
        raise Blocked({"mixer.kind": blocks[0].mixer.kind})
    said: dict[str, Any] = {**sizes(config), "intermediate_size": 1 if dense is None else dense.hidden}
    if attention is not None:
        said |= {**heads(attention), **write_rotary(attention.position, "partial_rotary_factor")}
        said |= {"attention_bias": attention.bias}
    if delta is not None:
        said |= {
            "linear_num_key_heads": delta.n_heads,
            "linear_key_head_dim": delta.head_dim,
            "linear_num_value_heads": delta.n_v_heads,
            "linear_value_head_dim": delta.v_head_dim,
            "linear_conv_kernel_dim": delta.d_conv,
        }
    if experts is None:
        said |= {"moe_intermediate_size": 1}
    else:
        said |= {
            "num_experts": experts.n_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.hidden,
            "shared_expert_intermediate_size": experts.shared_hidden,
            "norm_topk_prob": experts.normalised,
        }
    return {
        **said,
        "rms_norm_eps": blocks[0].norm.eps,
        "hidden_act": "silu",
        "layer_types": [FULL if isinstance(block.mixer, AttentionConfig) else LINEAR for block in blocks],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, block in enumerate(blocks) if not isinstance(block.ffn, ExpertsConfig)],
    }


FAMILY = Family("qwen3_next", "Qwen3NextForCausalLM", NAMES, read, write)
