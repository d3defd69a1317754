from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    said = draw(
        llama_like(
            partial_rotary_factor=st.sampled_from([None, 0.25, 0.5, 1.0]),
            max_position_embeddings=st.sampled_from([20, 48]),
            layer_norm_eps=st.sampled_from([1e-5, 1e-2]),
            hidden_act=st.sampled_from(["silu", "gelu"]),
            use_qkv_bias=st.booleans(),
            qk_layernorm=st.booleans(),
            use_parallel_residual=st.booleans(),
        )
    )
    del said["head_dim"]
    said["hidden_size"] = said["num_attention_heads"] * draw(st.sampled_from([16, 24]))
    return {name: value for name, value in said.items() if value is not None}  # absent: a quarter


CASE = Case("StableLmForCausalLM", fields(), quiet=("q_proj", "k_proj"))
