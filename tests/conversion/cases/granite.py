from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "GraniteForCausalLM",
    llama_like(
        hidden_size=st.sampled_from([22, 35, 48]),
        max_position_embeddings=st.sampled_from([20, 48]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-2]),
        hidden_act=st.sampled_from(["silu", "gelu"]),
        attention_bias=st.booleans(),
        mlp_bias=st.booleans(),
        embedding_multiplier=st.sampled_from([1.0, 12.0]),
        residual_multiplier=st.sampled_from([1.0, 0.22]),
        attention_multiplier=st.sampled_from([0.015625, 0.7, 1.0]),
        logits_scaling=st.sampled_from([1.0, 3.0, 8.0, 49.0, 0.7]),
    ),
    quiet=("k_proj",),
)
