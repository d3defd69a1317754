from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, ROPES, VOCAB, Case


@st.composite
def gpt_neox(draw: st.DrawFn) -> dict[str, Any]:
    n, h = draw(st.integers(1, 5)), draw(st.sampled_from([8, 10, 12, 16]))
    share, scaling = draw(st.sampled_from([0.25, 0.4, 0.5, 1.0])), draw(ROPES)
    turned = int(h * share)
    assume(turned % 2 == 0 and (turned > 2 or scaling["rope_type"] != "dynamic"))  # dynamic divides by turned - 2
    return {
        "vocab_size": VOCAB,
        "hidden_size": n * h,
        "intermediate_size": draw(st.sampled_from([28, 40])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": n,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": share, **scaling},
        "hidden_act": draw(st.sampled_from(["gelu", "gelu_fast", "gelu_new", "relu"])),
        "layer_norm_eps": draw(st.sampled_from([1e-5, 1e-3])),
        "use_parallel_residual": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }


CASE = Case("GPTNeoXForCausalLM", gpt_neox(), quiet=("embed_in",), renamed={"embed_out.weight": "lm_head.weight"})
