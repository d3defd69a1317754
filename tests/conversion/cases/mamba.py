from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": draw(st.sampled_from([12, 24, 30])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "max_position_embeddings": CONTEXT,
        "state_size": draw(st.sampled_from([3, 8, 16])),
        "conv_kernel": draw(st.integers(2, 5)),
        "expand": draw(st.integers(1, 3)),
        "time_step_rank": draw(st.sampled_from(["auto", 1, 5])),
        "use_bias": draw(st.booleans()),
        "use_conv_bias": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
    }


CASE = Case("MambaForCausalLM", fields(), quiet=("embeddings", "out_proj"))
