from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like, merged


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(llama_like(hidden_size=st.sampled_from([32, 36]), num_hidden_layers=st.integers(1, 4)))
    kinds, alpha, beta = st.sampled_from(["linear_attention", "full_attention"]), draw(st.sampled_from([1.0, 1.7])), 0.8
    factors = {f"{of}_{name}": x for of in ("mlp", "full_attn", "linear_attn")
               for name, x in (("alpha_factor", alpha), ("beta_factor", beta))}  # fmt: skip
    layers = drawn["num_hidden_layers"]
    return {
        **drawn,
        **factors,
        "layer_types": draw(st.lists(kinds, min_size=layers, max_size=layers)),
        "sliding_window": draw(st.sampled_from([None, 5])),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-2])),
        "num_local_experts": draw(st.sampled_from([2, 3, 5])),
        "num_experts_per_tok": draw(st.integers(1, 2)),
    }


CASE = Case(
    "MiniMaxForCausalLM", fields(), quiet=("down_proj",), loud=1.0, fixed=("slope_rate", "_decay"),
    gather=lambda named: merged(named, "block_sparse_moe.", "w1", "w3", "w2"),
)  # fmt: skip
