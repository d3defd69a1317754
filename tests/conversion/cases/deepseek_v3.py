from hypothesis import strategies as st

from tests.conversion.cases.base import Case, merged
from tests.conversion.cases.deepseek_v2 import deepseek

CASE = Case(
    "DeepseekV3ForCausalLM",
    deepseek(rope_interleave=st.booleans(), norm_topk_prob=st.booleans()),
    loud=1.0,
    gather=lambda named: merged(named, "mlp.", "gate_proj", "up_proj", "down_proj"),
)
