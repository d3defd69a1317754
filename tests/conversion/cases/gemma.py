from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "GemmaForCausalLM",
    llama_like(
        hidden_size=st.sampled_from([22, 35, 48]),
        max_position_embeddings=st.sampled_from([20, 48]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-2]),
        hidden_act=st.sampled_from(["gelu_pytorch_tanh", "gelu", "gelu_python", "silu"]),
        attention_bias=st.booleans(),
    ),
    quiet=("norm",),
    loud=1.0,
)
