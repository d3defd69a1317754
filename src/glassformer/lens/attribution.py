"""Direct logit attribution: contributions of each head, each FFN and the embedding to a token's logit.

The stream that the head reads is a sum, and a logit is linear in it once the norms keep their measured scale:

    logit = scale w . N(embed + sum of heads + sum of ffns + biases) + b,      N(x) = gain (x - mean(x)?) + bias

with gain = weight / rms(x) or weight / std(x), a constant. Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits". The direction scale w is carried down the layers: through the final norm, the norms after a
branch (sandwich, res-post-norm), the norms of the stream itself (post-norm), and the residual scale; a part's
contribution is its output along the direction at its place. They sum to the logit.

Indirect effects, through later parts, are not included: for these, ablate the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, capture, eager, in_vocabulary, sites, within
from glassformer.lens import style
from glassformer.lens.logit_lens import unembed
from glassformer.lens.maps import one_row, spell, spelled
from glassformer.lens.reading import Reading
from glassformer.model import Block, Model
from glassformer.parts.precision import exact

MOST_BARS = 14


@dataclass(frozen=True, eq=False, repr=False)
class LogitAttribution(Reading):
    """Contributions of a model's parts to the logit of `token` at a position; with `against`, to its lead over the
    logit of that token.

    `embed`; `heads` (l, n), zero if a layer has fewer, and a mixer without heads counts as one; `ffn` (l,), zero
    without one; `biases` (l,), of W_O and of the norms in the layer; `bias`, of the final norm and the head. `total` is
    their sum, the logit before a softcap; `logit` is the model's output."""

    title: ClassVar[str] = "Direct logit attribution"

    position: int
    word: str
    token: int
    token_word: str
    against: int | None
    against_word: str | None
    embed: float
    heads: Tensor
    ffn: Tensor
    biases: Tensor
    bias: float
    total: float
    logit: float

    def parts(self) -> dict[str, float]:
        """Returns {name: contribution}, largest first: "L5 H3" is head 3 of layer 5, "L5 ffn" its FFN."""
        found = {"embedding": self.embed, "biases": float(self.biases.sum()) + self.bias}
        for layer, (heads, ffn) in enumerate(zip(self.heads.tolist(), self.ffn.tolist(), strict=True)):
            found |= {f"L{layer} H{head}": value for head, value in enumerate(heads)} | {f"L{layer} ffn": ffn}
        return dict(sorted(found.items(), key=lambda part: -abs(part[1])))

    @property
    def question(self) -> str:
        lead = "" if self.against is None else f" over {self.against_word!r}"
        return f"logit of {self.token_word!r}{lead} after {self.word!r} (position {self.position})"

    def __str__(self) -> str:
        best = [f"{name} {value:+.2f}" for name, value in list(self.parts().items())[:8]]
        return f"{self.question}: {self.total:+.3f}\n{', '.join(best)}"

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default sized to the number of layers and
        heads."""
        layers, heads = self.heads.shape
        return super().figure(width or min(14.0, 6.0 + 0.3 * heads), height or min(12.0, max(4.5, 1.2 + 0.22 * layers)))

    def draw(self, figure: Any) -> None:
        layers, heads = self.heads.shape
        ratios = [max(2.5, min(9.0, 0.3 * heads)), 3.2]
        title = f"{self.question}: {self.total:+.2f}".replace("$", r"\$")
        table, bars = style.axes(figure, 1, 2, title=title, width_ratios=ratios).flat
        whole = torch.cat([self.heads, torch.zeros(layers, 1), self.ffn[:, None]], 1)
        style.heat(table, whole, label="contribution", signed=True)
        step = -(-heads // 16)
        shown = range(0, heads, step)
        table.set_xticks([*shown, heads + 1], [*map(str, shown), "ffn"])
        style.whole_ticks(table, "y")
        table.set(xlabel="head", ylabel="layer")
        names, values = zip(*list(self.parts().items())[:MOST_BARS], strict=True)
        colours = [style.COLOURS[0] if value > 0 else style.COLOURS[1] for value in values]
        bars.barh(range(len(names)), values, color=colours, height=0.7)
        bars.set_yticks(range(len(names)), names, color=style.INK)
        bars.margins(y=0.01)
        bars.invert_yaxis()
        bars.grid(False, axis="y")
        bars.axvline(0, color=style.RULE, linewidth=0.8)
        bars.set(xlabel="largest contributions")


def logit_attribution(
    model: Model,
    tokens: Tensor,
    token: int | None = None,
    against: int | None = None,
    position: int = -1,
    tokenizer: Any = None,
    words: Sequence[str] | None = None,
) -> LogitAttribution:
    """Returns the contributions of the model's parts to the logit of `token` at a position of tokens (1, s), or to its
    lead over `against`.

    `token` defaults to the model's prediction there. Raises RequestError for a position or token out of range, more
    than one row, and a wiring or norm whose scale cannot be held."""
    tokens, module = one_row(model, tokens), eager(model)
    labels, vocabulary = spelled(tokens, tokenizer, words), module.vocab_size
    (at,) = within(position, tokens.shape[1], "position", "the text")
    for given, what in ((token, "token"), (against, "against")):
        if given is not None:
            in_vocabulary(given, vocabulary, what, what)
    with at_rest(model), torch.no_grad():
        sums = ("resid_pre", "resid_mid", "resid_post", ".z", ".out")
        wanted = ["embed", *(name for name in sites(model) if name.endswith(sums))]
        seen = {name: value[0, 0] for name, value in capture(model, tokens, wanted, positions=at).items()}
        last = seen[f"layers.{len(module.layers) - 1}.resid_post"]
        logits = exact(unembed(model, last[None, None])[0, 0])
        token = int(logits.argmax()) if token is None else token
        if token == against:
            raise RequestError(
                f"against={against} is the token itself; leave it out for the logit itself",
                code="conflict", field="against", value=against,
            )  # fmt: skip
        found = _attribute(module, {name: exact(value) for name, value in seen.items()}, token, against)
    return LogitAttribution(
        at, labels[at], token, spell(token, tokenizer),
        against, None if against is None else spell(against, tokenizer), **found,
        logit=float(logits[token] - (0.0 if against is None else logits[against])),
    )  # fmt: skip


# A direction, carried down


def _attribute(module: Model, seen: dict[str, Tensor], token: int, against: int | None) -> dict[str, Any]:
    """Returns the contributions to a token's logit, as the fields of a `LogitAttribution`, from `seen`: the values of
    the sites at one position."""
    direction, own = _reads(module, token)
    if against is not None:
        other, less = _reads(module, against)
        direction, own = direction - other, own - less
    top = len(module.layers) - 1
    direction, constant = _held(module.final_norm, seen[f"layers.{top}.resid_post"], direction)
    layers: list[_Layer] = []
    for index in range(top, -1, -1):
        layers.append(_through(cast(Block, module.layers[index]), f"layers.{index}.", seen, direction))
        direction = layers[-1].below
    layers.reverse()
    heads = pad_sequence([layer.heads for layer in layers], batch_first=True).cpu()
    ffn, biases = (torch.stack(some).cpu() for some in ([one.ffn for one in layers], [one.biases for one in layers]))
    embed, bias = float(seen["embed"] @ direction), float(own + constant)
    total = embed + bias + float(heads.sum() + ffn.sum() + biases.sum())
    return {"embed": embed, "heads": heads, "ffn": ffn, "biases": biases, "bias": bias, "total": total}


def _reads(module: Model, token: int) -> tuple[Tensor, Tensor]:
    """Returns (direction (d,), constant ()) of a token: its logit before the softcap is the head's input along the
    direction, plus the constant."""
    head: Any = module.head
    if head.packed is None:
        weight, bias = head.applied(module.embedding), head.bias
    else:
        weight, bias = head.packed.applied(), head.packed.bias
    direction = exact(weight[token]) * head.scale
    return direction, direction.new_zeros(()) if bias is None else exact(bias[token])


def _held(norm: Any, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (direction, constant) before a norm with its scale held, as `Norm.held`: the output along `direction` is
    the input along the returned direction, plus the constant. Without a norm (None), the direction itself and 0."""
    return (direction, direction.new_zeros(())) if norm is None else norm.held(x, direction)


@dataclass(frozen=True)
class _Layer:
    heads: Tensor  # (n,)
    ffn: Tensor  # ()
    biases: Tensor  # ()
    below: Tensor  # (d,) the direction along which the stream before this layer contributes


def _through(block: Block, at: str, seen: dict[str, Tensor], direction: Tensor) -> _Layer:
    """Returns what a layer contributes to the stream after it along `direction`: the shares of its heads, FFN and
    biases."""
    wiring: Any = block.residual
    if wiring.norms_stream is None:
        raise RequestError(
            f"residual {type(wiring).__name__} does not say how its norms are placed (norms_stream), so that "
            "logit attribution cannot write its stream as a sum",
            code="unsupported", field="residual", value=type(wiring).__name__,
        )  # fmt: skip
    mixer: Any = block.mixer
    ffn = biases = direction.new_zeros(())
    if block.ffn is not None:
        out = seen[f"{at}ffn.out"]
        along, direction, biases = _branch(block.residual, "ffn", seen.get(f"{at}resid_mid"), out, direction)
        ffn = out @ along
    out = seen[f"{at}mixer.out"]
    along, direction, more = _branch(block.residual, "mixer", seen[f"{at}resid_pre"], out, direction)
    if (output := mixer.head_output) is None:  # counts as one head
        return _Layer((out @ along)[None], ffn, biases + more, direction)
    z = seen[f"{at}mixer.z"]  # (n, h)
    heads = (z * (exact(output.applied()).mT @ along).view_as(z)).sum(-1)
    own = 0.0 if output.bias is None else exact(output.bias) @ along
    return _Layer(heads, ffn, biases + more + own, direction)


def _branch(
    wiring: Any, name: str, stream: Tensor | None, out: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the directions (u, w) and a constant that split the stream after a branch: its part along `direction` is
    the branch's output along u, plus the stream before the branch along w, plus the constant."""
    below, constant, norms = direction, direction.new_zeros(()), dict(wiring.named_children())
    if wiring.norms_stream:
        assert stream is not None, "a wiring that norms the stream between its branches has a resid_mid"
        below, constant = _held(norms[f"{name}_norm"], stream + wiring.scale * out, direction)
    along, more = _held(norms.get(f"{name}_post_norm"), out, below * wiring.scale)
    return along, below, constant + more
