from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.integers(1, 3))
    heads, head_dim, expand = groups * draw(st.integers(1, 2)), draw(st.sampled_from([3, 4])), draw(st.integers(1, 2))
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * head_dim * 2,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "max_position_embeddings": CONTEXT,
        "num_heads": 2 * heads * expand,
        "head_dim": head_dim,
        "n_groups": groups,
        "state_size": draw(st.sampled_from([3, 8, 16])),
        "conv_kernel": draw(st.integers(2, 5)),
        "expand": expand,
        "use_bias": draw(st.booleans()),
        "use_conv_bias": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
        "time_step_limit": draw(st.sampled_from([(0.0, math.inf), (0.3, 0.9)])),
        "tie_word_embeddings": draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([8, 64])),
    }


CASE = Case("Mamba2ForCausalLM", fields(), quiet=("norm_f",), loud=1.0)
