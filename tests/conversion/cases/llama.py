from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "LlamaForCausalLM",
    llama_like(
        rms_norm_eps=st.sampled_from([1e-6, 1e-3]),
        attention_bias=st.booleans(),
        mlp_bias=st.booleans(),
        hidden_act=st.sampled_from(["silu", "gelu", "relu", "gelu_pytorch_tanh"]),
    ),
    quiet=("embed_tokens",),
)
