from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, ROPES, VOCAB, Case, heads

Wirings = tuple[dict[str, Any], ...]
OLD: Wirings = ({"multi_query": True}, {"multi_query": False}, {"multi_query": True, "parallel_attn": False},
       {"multi_query": False, "parallel_attn": False})  # fmt: skip
NEW: Wirings = ({}, {"num_ln_in_parallel_attn": 1}, {"num_ln_in_parallel_attn": 2, "multi_query": False})


@st.composite
def falcon(draw: st.DrawFn) -> dict[str, Any]:
    n, g, h = heads(draw)
    wiring = draw(st.sampled_from(OLD + NEW))
    new = {"new_decoder_architecture": True, "num_kv_heads": g} if wiring in NEW else {}
    return {
        "vocab_size": VOCAB,
        "hidden_size": n * h,
        "ffn_hidden_size": draw(st.sampled_from([None, 36])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": n,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_theta": draw(st.sampled_from([1e4, 5e5])), **draw(ROPES)},
        "alibi": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "activation": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-3])),
        "tie_word_embeddings": draw(st.booleans()),
        **wiring,
        **new,
    }


CASE = Case("FalconForCausalLM", falcon(), quiet=("word_embeddings",), attention="sdpa")
"""Its eager attention adds alibi twice: to the scores, and with the mask."""
