from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like


@st.composite
def qwen_like(draw: st.DrawFn, **more: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draws fields of Qwen2 or 3 whose windows are given by the first layer, or layer by layer."""
    act = st.sampled_from(["silu", "gelu", "relu", "gelu_pytorch_tanh"])
    eps, h = st.sampled_from([1e-6, 1e-3]), st.sampled_from([6, 8, 14])
    fields = draw(llama_like(rms_norm_eps=eps, hidden_act=act, head_dim=h, **more))
    layers = fields["num_hidden_layers"]
    if draw(st.booleans()):
        fields |= {"use_sliding_window": True, "sliding_window": draw(st.sampled_from([None, 1, 4, 17]))}
        fields["max_window_layers"] = draw(st.integers(0, layers + 1))
        if fields["sliding_window"] and draw(st.booleans()):
            kinds = st.sampled_from(["full_attention", "sliding_attention"])
            fields["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return fields


@st.composite
def qwen2(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(qwen_like(hidden_size=st.sampled_from([35, 50, 64])))
    if draw(st.booleans()):  # as published: the width says it
        fields["hidden_size"] = 2 * fields["num_attention_heads"] * fields.pop("head_dim")
    return fields


CASE = Case("Qwen2ForCausalLM", qwen2())
