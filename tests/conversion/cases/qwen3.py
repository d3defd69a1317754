from hypothesis import strategies as st

from tests.conversion.cases.base import Case
from tests.conversion.cases.qwen2 import qwen_like

CASE = Case(
    "Qwen3ForCausalLM",
    qwen_like(attention_bias=st.booleans(), hidden_size=st.sampled_from([35, 50, 64])),
)
