from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    said = draw(
        llama_like(
            head_dim=st.sampled_from([8, 16, 24]),
            hidden_size=st.sampled_from([22, 35, 48]),
            partial_rotary_factor=st.sampled_from([None, 0.5, 0.75, 1.0]),
            max_position_embeddings=st.sampled_from([20, 48]),
            layer_norm_eps=st.sampled_from([1e-5, 1e-2]),
            hidden_act=st.sampled_from(["gelu_new", "gelu", "relu", "silu"]),
            qk_layernorm=st.booleans(),
        )
    )
    if said["qk_layernorm"]:  # norms of hidden_size / n values
        said["hidden_size"] = said["head_dim"] * said["num_attention_heads"]
        del said["head_dim"]
    return {name: value for name, value in said.items() if value is not None}  # absent: a half


CASE = Case("PhiForCausalLM", fields(), quiet=("q_proj", "k_proj"))
