from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "Olmo2ForCausalLM",
    llama_like(
        hidden_size=st.sampled_from([22, 35, 48]),
        max_position_embeddings=st.sampled_from([20, 48]),
        rms_norm_eps=st.sampled_from([1e-5, 1e-2]),
        hidden_act=st.sampled_from(["silu", "gelu"]),
        attention_bias=st.booleans(),
    ),
    quiet=("q_proj", "k_proj", "o_proj", "down_proj"),
)
