from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like, merged

CASE = Case(
    "OlmoeForCausalLM",
    llama_like(
        hidden_size=st.sampled_from([36, 72]),
        num_attention_heads=st.sampled_from([3, 6]),
        num_key_value_heads=st.sampled_from([3, 1]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-3]),
        hidden_act=st.sampled_from(["silu", "gelu", "relu"]),
        attention_bias=st.booleans(),
        num_experts=st.sampled_from([2, 3, 5]),
        num_experts_per_tok=st.sampled_from([1, 2]),
        norm_topk_prob=st.booleans(),
    ).map(lambda fields: {name: value for name, value in fields.items() if name != "head_dim"}),
    gather=lambda named: merged(named, "mlp.", "gate_proj", "up_proj", "down_proj"),
)
