"""The class of a family's case, and functions that the cases share."""

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
    """A published class and a strategy of its configs (`fields`). Weights are drawn large ("loud"), so that every part
    changes the output."""

    architecture: str
    fields: st.SearchStrategy[dict[str, Any]]
    quiet: tuple[str, ...] = ()
    """Substrings of names of parameters that stay small, so that eps and caps change the output."""
    loud: float = 1.5
    """Gain of the matrices; lower if scores become so sharp that fp32 rounding exceeds the tests' bound."""
    attention: str = "eager"
    """Attention implementation of the published class, used as the oracle."""
    fixed: tuple[str, ...] = ()
    """Suffixes of names of buffers that follow from the config."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor in the file -> its name in the class, for tensors that `transformers` renames."""
    classes: tuple[str, ...] = ()
    """Published classes; the seed chooses one. If empty, `architecture`."""
    first_token: int = 0
    """Least token that may be drawn; the class treats lower tokens specially."""
    gather: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda named: named
    """Function from tensors of the file to those of the class, for tensors that `transformers` joins."""

    also: Callable[[Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]] = lambda tokens: ({}, {})
    """Function of tokens (b, s) that returns further arguments of our model, and of theirs."""

    unused: str = "-"
    """Substring of names of weights on which no output of the class depends; ours leaves them out."""
    reads: Callable[[int, int], Tensor] | None = None
    """Function of (pixels per side, channels) that returns the model's input; None if it reads tokens."""

    def model(self, fields: dict[str, Any], seed: int) -> nn.Module:
        """Returns the published model with random weights in every parameter, norms and biases included."""
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
    """Draws (query heads, KV heads, head dim); head counts may be odd, the head dim is a multiple of `even`."""
    g = draw(st.sampled_from([1, 2, 3]))
    n = g * draw(st.sampled_from([1, 2, 3])) if groups else g
    return n, g, even * draw(st.integers(2, 4))


def encoder(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Returns a strategy of the fields of BERT and its relatives; `more` are fields of one family."""
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
"""Strategy of the rotary scalings that most families support."""


@st.composite
def llama_like(draw: st.DrawFn, **more: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draws the fields that most families share; `more` adds fields of one family."""
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
