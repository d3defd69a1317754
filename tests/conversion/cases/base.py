"""What a case is, and what the families' cases have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CONTEXT = 48
VOCAB = 61


@dataclass(frozen=True)
class Case:
    """`fields` draws keyword arguments of the class' config; a loud model lets every part speak."""

    architecture: str
    fields: st.SearchStrategy[dict[str, Any]]
    quiet: tuple[str, ...] = ()
    """Parts of parameter names to keep small, so that eps and caps are felt."""
    loud: float = 1.5
    """Gain of the matrices; lower where scores grow so sharp that fp32 itself leaves less than the tests' bound."""
    attention: str = "eager"
    """The published class' implementation that is the oracle."""
    fixed: tuple[str, ...] = ()
    """Ends of names of buffers that follow from the config."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensor of the file -> what the class calls it, where `transformers` renames between them."""
    classes: tuple[str, ...] = ()
    """The published classes of one draw each, by the seed; empty: `architecture` alone."""
    first_token: int = 0
    """The least token that may be drawn: those below mean something of their own to the class."""
    gather: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda named: named
    """Tensors of the file -> those of the class, where `transformers` joins several."""

    also: Callable[[Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]] = lambda tokens: ({}, {})
    """What our model and theirs are called with besides tokens (b, s)."""

    unused: str = "-"
    """A part of the names of weights that the class holds and none of its answers depends on; we hold none."""
    reads: Callable[[int, int], Tensor] | None = None
    """(pixels on a side, channels) -> what it reads instead of tokens."""

    def model(self, fields: dict[str, Any], seed: int) -> nn.Module:
        """Their model with random weights in every parameter, norms and biases included."""
        cls = getattr(transformers, self.classes[seed % len(self.classes)] if self.classes else self.architecture)
        special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = cls.config_class(**{**special, **fields})
        config._attn_implementation = self.attention
        model = cls(config).eval()
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            kept = [(name, value) for name, value in model.named_buffers() if name in model.state_dict()]
            learned = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
            for name, weight in [*learned, *(one for one in kept if not one[0].endswith(self.fixed))]:
                noise = torch.randn(weight.shape, generator=draw)
                if any(part in name for part in self.quiet):
                    noise *= 0.02
                elif weight.dim() == 2 and "norm" not in name:
                    noise *= self.loud / weight.shape[-1] ** 0.5
                else:
                    noise = noise * 0.3 + ("norm" in name or "ln_" in name) * name.endswith("weight")
                weight.copy_(noise)
        return model


def heads(draw: st.DrawFn, even: int = 2, groups: bool = True) -> tuple[int, int, int]:
    """(n, g, h): odd head counts too; h a multiple of `even`."""
    g = draw(st.sampled_from([1, 2, 3]))
    n = g * draw(st.sampled_from([1, 2, 3])) if groups else g
    return n, g, even * draw(st.integers(2, 4))


def encoder(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The fields of BERT and its relatives; `more` are a family's own."""
    own: dict[str, st.SearchStrategy[Any]] = {
        "num_hidden_layers": st.integers(1, 3),
        "intermediate_size": st.sampled_from([28, 40]),
        "hidden_act": st.sampled_from(["gelu", "relu", "gelu_new", "silu"]),
        "layer_norm_eps": st.sampled_from([1e-12, 1e-5]),
        "max_position_embeddings": st.just(CONTEXT),
        **more,
    }
    return st.builds(
        lambda n, h, **drawn: {"vocab_size": VOCAB, "num_attention_heads": n, "hidden_size": n * h, **drawn},
        n=st.integers(1, 4),
        h=st.sampled_from([6, 8]),
        **own,
    )


ROPES = st.one_of(
    st.just({"rope_type": "default"}),
    st.builds(lambda f: {"rope_type": "linear", "factor": f}, st.sampled_from([2.0, 3.5])),
    st.builds(lambda f: {"rope_type": "dynamic", "factor": f}, st.sampled_from([2.0, 4.0])),
    st.builds(
        lambda f, o: {"rope_type": "yarn", "factor": f, "original_max_position_embeddings": o},
        st.sampled_from([2.0, 4.0]),
        st.sampled_from([12, 24]),
    ),
    st.builds(
        lambda f, o: {
            "rope_type": "llama3",
            "factor": f,
            "original_max_position_embeddings": o,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        st.sampled_from([4.0, 8.0]),
        st.sampled_from([12, 24]),
    ),
)
"""The scalings that most families may carry."""


@st.composite
def llama_like(draw: st.DrawFn, **more: st.SearchStrategy[Any]) -> dict[str, Any]:
    """The fields that most families share; `more` adds a family's own."""
    n, g, h = heads(draw)
    return {
        "vocab_size": VOCAB,
        "hidden_size": n * draw(st.sampled_from([6, 8, 10])),
        "intermediate_size": draw(st.sampled_from([16, 28, 40])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": n,
        "num_key_value_heads": g,
        "head_dim": h,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": {"rope_theta": draw(st.sampled_from([1e4, 5e5])), **draw(ROPES)},
        **{name: draw(strategy) for name, strategy in more.items()},
    }


def merged(named: dict[str, Tensor], where: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """Tensors of each expert as the class holds them: gate over up, and down, of all experts."""
    made: dict[str, Tensor] = {}
    for name, value in named.items():
        found = re.fullmatch(rf"(.+\.){re.escape(where)}(?:experts\.(\d+)\.(\w+)|gate)\.weight", name)
        if found is None:
            made[name] = value
        elif found[2] is None:
            made[f"{found[1]}mlp.gate.weight"] = value
        elif found[3] == gate:
            both = torch.cat([value, named[name.replace(f".{gate}.", f".{up}.")]])[None]
            at = f"{found[1]}mlp.experts.gate_up_proj"
            made[at] = torch.cat([made[at], both]) if at in made else both
        elif found[3] == down:
            at = f"{found[1]}mlp.experts.down_proj"
            made[at] = torch.cat([made[at], value[None]]) if at in made else value[None]
    return made
