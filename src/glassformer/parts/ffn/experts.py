"""Mixture of experts: many feed-forward networks; a router selects a few for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from glassformer.errors import RequestError, check_whole
from glassformer.parts.core import auxiliary
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.exchange import Exchange
from glassformer.parts.core.init import Init
from glassformer.parts.core.reduce import total
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word, whole_number
from glassformer.parts.ffn.base import ACTIVATIONS, FFN, FFNConfig
from glassformer.parts.ffn.glu import Clamp, GluConfig, gating, refuse_clamp
from glassformer.parts.ffn.mlp import MlpConfig
from glassformer.parts.forward_pass import Pass
from glassformer.parts.grouped import BLOCK, Groups, filled_rows, wants_blocks
from glassformer.parts.linear import GroupedLinear, Linear, Matrix, linear_cost
from glassformer.parts.precision import full_precision, product_dtype, rowwise_linear, wide
from glassformer.parts.reparam import MakeReparam

Score = Literal["softmax", "sigmoid"]
Weigh = Literal["output", "input"]

_SCORES = {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}


class Router(Linear):
    """Router: chooses the experts of a token and their weights.

        p = softmax(x W^T + b), or sigmoid      I = the k experts of largest p + c      w_i = scale p_i (/ sum_I p)

    x (b, s, d), W (e, d), p (b, s, e), w and I (b, s, k). Matmuls and p are at least in fp32, because rounding flips
    choices. An expert with p = 0 is chosen only if no other is left.

    With `n_groups`, the choice is limited to the experts of some groups; experts i of equal i // (e / n_groups) are a
    group (those on one machine). The score of a group is the sum of its `group_best` largest p + c, and experts of
    the `top_groups` groups of highest score may be chosen: DeepSeek-V2, 2405.04434, section 2.2.2 (group_best 1), V3,
    2412.19437, section 2.1.2 (2).

    Load balancing, in training only; f_i is the share of assignments that expert i receives, P_i the mean of its p
    (over the sum of p), over the tokens of one pass, without padding:
    - `balance_loss` alpha: alpha e sum_i f_i P_i, alpha for a level load. Fedus et al. 2021, 2101.03961, eq. 4.
    - `z_loss`: times the mean of (log sum exp(logits))^2. Zoph et al. 2022, 2202.08906, eq. 5.
    - `balance_rate` gamma: the selection bias c, which has no gradient: after every optimizer step (`after_step`)
      c_i += gamma sign(1/e - f_i), f over the tokens since the last. Wang et al. 2024, 2408.15664. None for no c.

    While training, the load of an expert may be bounded:
    - `capacity` c: an expert serves the first ceil(c n k / e) of the assignments that the n tokens of a pass give it.
      The others are dropped (`dropped`: their share in the last pass). Lepikhin et al. 2020, 2006.16668, section 2.2.
      First is first in the batch, so no token depends on a later one of its text; it does on earlier texts. None to
      serve every token.

    The two losses join the gradient of `Model.loss` and leave its value (`parts/core/auxiliary.py`). A batch in
    microbatches has the mean of their losses, each for a level load within the microbatch. Processes that share a batch
    sum f and the load (`parts/core/reduce.py`); with that, the mean of their gradients is the gradient of the whole
    batch.
    """

    packable = False
    in_half = False
    selection_bias: Tensor | None
    load: Tensor | None

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        top_k: int,
        score: Score = "softmax",
        normalised: bool = True,
        scale: float = 1.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        balance_rate: float | None = None,
        reparam: MakeReparam | None = None,
        bias: bool = False,
        n_groups: int = 1,
        top_groups: int = 1,
        group_best: int = 1,
        capacity: float | None = None,
    ):
        check_routing(n_experts, top_k, n_groups, top_groups, group_best)
        super().__init__(d_model, n_experts, bias, reparam=reparam)
        self.n_groups, self.top_groups, self.group_best = n_groups, top_groups, group_best
        self.capacity = capacity
        share = Fraction(capacity or 0).limit_denominator(1 << 20)  # integers, equal on every device
        self._room = share.numerator, share.denominator * n_experts
        self.dropped: Tensor | float = 0.0
        self.top_k, self.score, self.normalised, self.scale = top_k, _SCORES[score], normalised, scale
        self.balance_loss, self.z_loss, self.balance_rate = balance_loss, z_loss, balance_rate
        for name in ("selection_bias", "load"):  # load: assignments since the last step
            self.register_buffer(name, None if balance_rate is None else torch.zeros(n_experts))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        """Returns the logits (..., e) of all experts for each token."""
        with full_precision(x):
            weight = self.weight if self.reparam is None else self.reparam(self.weight)
            logits = rowwise_linear(wide(x), wide(weight))
            return logits if self.bias is None else logits + wide(self.bias)

    def choose(self, p: Float[Tensor, "*b e"]) -> tuple[Float[Tensor, "*b k"], Int[Tensor, "*b k"]]:
        """Returns (weights w, indices I) of the k experts chosen for each token, (..., k) each, from p."""
        rank = p.detach() if self.selection_bias is None else p.detach() + self.selection_bias
        rank = rank.masked_fill(p <= 0, -torch.inf)
        if self.n_groups > 1:
            rank = self._in_groups(rank)
        chosen = rank.topk(self.top_k, dim=-1).indices
        weights = p.gather(-1, chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        return weights * self.scale, chosen

    def _in_groups(self, rank: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
        """Returns the values `rank` (p plus the selection bias), which decide the choice of experts, with -inf in place
        of those of experts outside the `top_groups` best groups."""
        of_group = rank.unflatten(-1, (self.n_groups, -1))
        best = of_group.topk(self.group_best, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        counts = torch.zeros_like(of_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        return of_group.masked_fill(~counts[..., None], -torch.inf).flatten(-2)

    def serve(
        self, weights: Float[Tensor, "*b k"], chosen: Int[Tensor, "*b k"], real: Bool[Tensor, "*b"] | None = None
    ) -> Float[Tensor, "*b k"]:
        """Returns the weights of the chosen experts, with 0 for each assignment beyond an expert's capacity in this
        pass. `real`: mask of tokens that are not padding; None for all."""
        if self.capacity is None:
            return weights
        late = self.late(chosen, real)
        self.dropped = mean_of(late.flatten(0, -2).float(), real).mean()
        return weights.masked_fill(late, 0.0)

    def late(self, chosen: Int[Tensor, "*b k"], real: Bool[Tensor, "*b"] | None = None) -> Bool[Tensor, "*b k"]:
        """Returns a mask, True for each assignment beyond an expert's capacity; all False without a capacity. Padding
        takes no place."""
        if self.capacity is None:
            return torch.zeros_like(chosen, dtype=torch.bool)
        flat, e = chosen.flatten(), self.outs[0]
        given: Tensor | int = len(flat)
        if real is not None:  # padding is assigned to a nonexistent expert
            flat, given = chosen.masked_fill(~real[..., None], e).flatten(), real.sum() * self.top_k
        by_expert, order = flat.sort(stable=True)
        first = torch.searchsorted(by_expert, torch.arange(e + 1, device=flat.device))
        turn = torch.empty_like(flat).scatter(0, order, torch.arange(len(flat), device=flat.device) - first[by_expert])
        share, of = self._room
        return ((turn >= -(-given * share // of)) & (flat < e)).view_as(chosen)

    def balance(
        self, logits: Float[Tensor, "n e"], p: Float[Tensor, "n e"], counts: Float[Tensor, " e"],
        real: Bool[Tensor, " n"] | None = None,
    ) -> None:  # fmt: skip
        """Adds this pass's balance and z loss to the training loss and accumulates expert load. `counts` (e,): tokens
        routed to each expert; `real`: mask of tokens that are not padding, None for all."""
        if self.balance_loss:
            everywhere = total(counts)
            share, mean = everywhere / everywhere.sum().clamp_min(1), mean_of(p / p.sum(-1, keepdim=True), real)
            auxiliary.add(self.balance_loss * len(counts) * (share * mean).sum())
        if self.z_loss:
            auxiliary.add(self.z_loss * mean_of(logits.logsumexp(-1).square(), real))
        if self.load is not None:
            self.load += counts

    @torch.no_grad()
    def after_step(self) -> None:
        """Updates the selection bias after an optimizer step."""
        if self.balance_rate is not None and self.selection_bias is not None and self.load is not None:
            load = total(self.load)
            self.selection_bias += self.balance_rate * torch.sign(load.mean() - load)
            self.load.zero_()

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        super().init_weights(init)
        for buffer in self.buffers(recurse=False):
            buffer.zero_()


def mean_of(x: Float[Tensor, "n ..."], real: Bool[Tensor, "*b"] | None) -> Tensor:
    """Returns the mean of the rows of x where the mask `real` is True; None for all rows. 0 if no element is True, and
    bit for bit `x.mean(0)` if all are."""
    if real is None:
        return x.mean(0)
    rows = real.flatten()
    kept = x.where(rows.view(-1, *[1] * (x.dim() - 1)), torch.zeros((), dtype=x.dtype, device=x.device))
    return kept.mean(0) * (len(rows) / rows.sum().clamp_min(1).to(x.dtype))


def check_routing(e: int, k: int, n_groups: int, top_groups: int, group_best: int) -> None:
    """Raises RequestError if no router can choose k of e experts from `top_groups` of `n_groups` groups, ranked by
    their `group_best` largest values."""
    sizes = {"n_experts": e, "top_k": k, "n_groups": n_groups, "top_groups": top_groups, "group_best": group_best}
    for name, value in sizes.items():
        check_whole(name, value)
    if e % n_groups:
        message = f"n_groups={n_groups} does not divide n_experts={e}"
        raise RequestError(message, code="range", field="n_groups", value=n_groups)
    size = e // n_groups
    for name, most, these in (
        ("top_k", e, f"n_experts={e}; use 1 to {e}"),
        ("top_groups", n_groups, f"n_groups={n_groups}; use 1 to {n_groups}"),
        ("group_best", size if n_groups > 1 else group_best, f"the {size} experts of a group; use 1 to {size}"),
        ("top_k", size * top_groups, f"the {size * top_groups} experts of top_groups={top_groups} groups"),
    ):
        if (value := sizes[name]) > most:
            message = f"{name}={value} is more than {these}"
            raise RequestError(message, code="range", field=name, value=value, expected=f"<= {most}")


class Experts(FFN):
    """y = sum over the k chosen experts i of w_i(x) E_i(x) (+ shared(x)). Shazeer et al. 2017, 1701.06538.

    x, y (b, s, d); the `Router` computes w and the choice. E_i(x) = (phi(x W_gate) * x W_up) W_down if `gated`, else
    phi(x W_up) W_down, with matrices of e experts stacked by rows: W_gate, W_up (e f, d), W_down (e d, f), and `clamp`
    as in `Glu`. Every token is served, even if many choose one expert, unless the router has a capacity. `shared`
    processes every token (Dai et al. 2024, 2401.06066); with `shared_gate`, times sigmoid(x w) (Qwen2-MoE, 2407.10671).
    With weigh="input" the weight multiplies the input: E_i(w_i x) (Llama 4).

    Sites: router, the p of every expert, before the choice, so that an edit changes the choice; out; the sites of
    `shared`; and gate, up and hidden (b,s,k,f) of the k chosen experts of a token, in the order of `router.choose(p)`.
    The rows are sorted into that order only for observers and edits.

    With an `exchange`, only some experts are on this rank, and rows are sent between ranks (`parts/core/exchange.py`).
    """

    exchange: Exchange | None = None

    def __init__(
        self,
        d_model: int,
        hidden: int,
        router: Router,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        shared: FFN | None = None,
        reparam: MakeReparam | None = None,
        clamp: Clamp | None = None,
        shared_gate: bool = False,
        weigh: Weigh = "output",
    ):
        super().__init__()
        self.weigh = weigh
        self.router, e = router, router.outs[0]
        self.gate_proj = GroupedLinear(e, d_model, hidden, bias, reparam=reparam) if gated else None
        self.up_proj = GroupedLinear(e, d_model, hidden, bias, reparam=reparam)
        self.down_proj = GroupedLinear(e, hidden, d_model, bias, role="output", reparam=reparam)
        self.activation: Callable[..., Tensor] = gating(activation, clamp) if gated else ACTIVATIONS[activation]
        self.shared = shared
        self.shared_gate = Linear(d_model, 1, reparam=reparam) if shared_gate else None
        self.routing, self.out = Site("bse", name="router"), Site()
        self.gate = Site("bskf") if gated else None
        self.up, self.hidden = Site("bskf"), Site("bskf")

    @property
    def n_experts(self) -> int:
        return self.router.outs[0]

    def keep(self, first: int, last: int, exchange: Exchange) -> None:
        """Removes all experts but `first` .. `last`-1 from this rank, as `parts.core.exchange.Exchanging` defines."""
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            if linear is not None:
                linear.keep(first, last)
        self.exchange = exchange

    def matrices(self) -> dict[str, Matrix]:
        """Returns the weight matrices by name; those of the experts count as divided into heads, one for each
        expert."""
        maps = {"gate": self.gate_proj, "up": self.up_proj, "down": self.down_proj}
        own = {
            name: Matrix(linear.weight, 0, len(linear.weight), len(linear.outs), linear)
            for name, linear in maps.items()
            if linear is not None
        }
        shared = self.shared.matrices() if self.shared is not None else {}
        if self.shared_gate is not None:
            shared["open"] = Matrix.of(self.shared_gate)
        return {"router": Matrix.of(self.router), **own, **{f"shared.{name}": one for name, one in shared.items()}}

    def forward(self, x: Float[Tensor, "*b d"], pass_: Pass | None = None) -> Float[Tensor, "*b d"]:
        """Returns the output y of the mixture; padding does not count for the load of experts."""
        real = None if pass_ is None else pass_.real
        logits = self.router(x)
        p = self.routing(self.router.score(logits))
        weights, chosen = self.router.choose(p)
        if self.training and torch.is_grad_enabled():
            flat = chosen.flatten()
            each = torch.ones_like(chosen, dtype=p.dtype) if real is None else real[..., None].to(p.dtype)
            counts = p.new_zeros(p.shape[-1]).index_add(0, flat, each.expand_as(chosen).flatten())
            rows = None if real is None else real.flatten()
            self.router.balance(logits.flatten(0, -2), p.flatten(0, -2), counts, rows)
            weights = self.router.serve(weights, chosen, real)
        y = self.mix(x, weights, chosen)
        if self.shared is not None:
            y = y + self.of_shared(x)
        return self.out(y)

    @property
    def spreads(self) -> bool:
        """True if processes may share the tokens of a sequence: not with a capacity, under which an expert serves only
        the first tokens of a pass."""
        return self.router.capacity is None and (self.shared is None or self.shared.spreads)

    def of_shared(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Returns the output of the shared experts for x, times the shared gate if the model has one."""
        assert self.shared is not None
        seen = self.shared(x)
        return seen if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * seen

    def mix(
        self, x: Float[Tensor, "*b d"], weights: Float[Tensor, "*b k"], chosen: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "*b d"]:
        """Returns the output of the routed experts, sum_k w_k E_k(x), or with weigh="input" sum_k E_k(w_k x). All rows
        of an expert are computed together, so that its weights are read once."""
        by_expert, order = chosen.flatten().sort(stable=True)
        flat, tokens, back = x.flatten(0, -2), order // chosen.shape[-1], order.argsort()
        flat = flat.to(product_dtype(flat))
        journey = None if self.exchange is None else self.exchange(by_expert)
        share = weights.flatten()[order] if self.weigh == "input" else None
        if journey is None:
            groups = Groups.sorted(by_expert, len(self.up_proj.outs))
            if wants_blocks(x, len(order), len(groups.ends)):
                groups, place = groups.in_blocks(BLOCK)  # padded with the first token, whose results are dropped
                tokens, back = torch.zeros_like(groups.of).scatter(0, place, tokens), place[back]
                share = None if share is None else share.new_zeros(len(tokens)).index_copy(0, place, share)
        rows = flat.index_select(0, tokens)
        if share is not None:
            rows = (rows * share[:, None]).to(rows.dtype)
        if journey is not None:
            rows, groups = journey.there(rows)

        def at(site: Site, rows: Tensor) -> Tensor:
            """Returns the expert rows `rows` after the edits of a site; observers and edits of the site receive them as
            (*b, k, f), token by token, in the order of the choice."""
            if not site.watched:
                return rows
            own = rows if journey is None else journey.back(rows)
            seen = site(own.index_select(0, back).view(*chosen.shape, -1))
            if not site.edited:
                return rows
            own = own.index_copy(0, back, seen.flatten(0, -2))
            return own if journey is None else journey.there(own)[0]

        up = at(self.up, self.up_proj(rows, groups))
        if self.gate_proj is None or self.gate is None:
            hidden = self.activation(up)
        else:
            hidden = self.activation(at(self.gate, self.gate_proj(rows, groups)), up)
        y = self.down_proj(at(self.hidden, hidden), groups)
        if journey is not None:
            y = journey.back(y)
        y = y.index_select(0, back).view(*chosen.shape, -1)
        return (y if self.weigh == "input" else y * weights[..., None]).sum(-2).to(y.dtype)

    def naive_mix(self, x: Float[Tensor, "n d"], weights: Float[Tensor, "n k"], chosen: Int[Tensor, "n k"]) -> Tensor:
        """Returns the output of the routed experts by its definition: every expert computes every token, with weight 0
        for tokens that did not choose it."""

        def every(linear: GroupedLinear, x: Tensor) -> Tensor:
            """Returns the results (n, e, o) of the linear layer of each expert for x: (n, i), equal for all experts, or
            (n, e, i)."""
            y = torch.einsum("...i,eoi->...eo" if x.dim() == 2 else "...ei,eoi->...eo", x, linear.maps())
            return y if linear.bias is None else y + linear.bias.view(len(linear.outs), -1)

        all_weights = weights.new_zeros(len(x), len(self.up_proj.outs)).scatter(1, chosen, weights)
        if self.weigh == "input":
            sent = torch.zeros_like(all_weights).scatter(1, chosen, 1.0)
            x, all_weights = x[:, None] * all_weights[..., None], sent
        up = every(self.up_proj, x)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(every(self.gate_proj, x), up)
        y = every(self.down_proj, hidden)
        return (y * all_weights[..., None]).sum(1).to(y.dtype)


def read_experts(word: str, text: str) -> dict[str, Any]:
    """Returns the fields of an `ExpertsConfig` for the text of the short name `+moe:E:K` or `+moe:E:K:F`: E experts, K
    per token, each F wide."""
    if not 2 <= text.count(":") + 1 <= 3:
        raise RequestError(
            f"{word}:{text}: use moe:experts:chosen, such as moe:8:2, or moe:experts:chosen:hidden",
            code="syntax", field=word, value=text,
        )  # fmt: skip
    n_experts, top_k, *hidden = (whole_number(word, part) for part in text.split(":"))
    return {"n_experts": n_experts, "top_k": top_k, "hidden": hidden[0] if hidden else None}


class ExpertsConfig(FFNConfig, kind="experts", words=Word("moe", read_experts, "8:2")):
    """Config of a mixture of experts. `hidden` is the width of one expert; None for the width at which the experts of a
    token, shared ones included, together have the weights of one dense network, up to a multiple of 8."""

    n_experts: int = Field(8, gt=0, le=1 << 16)
    top_k: int = Field(2, gt=0, le=1 << 16)
    gated: bool = True
    activation: Literal["sigmoid", "relu", "gelu", "gelu_tanh", "silu", "relu2"] = "silu"
    bias: bool = False
    n_shared: int = Field(0, ge=0, le=1 << 16)
    """Number of experts that process every token, as one FFN of n_shared times the width."""
    shared_hidden: int | None = Field(None, gt=0, le=1 << 24)
    """Width of the shared FFN; None for `n_shared` times `hidden`."""
    shared_gate: bool = False
    """True if the output of the shared FFN is multiplied by sigmoid(x w)."""
    weigh: Weigh = "output"
    """"output" if the router's weight of an expert multiplies its output, "input" if its input."""
    clamp: Clamp | None = None
    """Bounds of the gating, for SwiGLU experts; None without bounds."""
    router_bias: bool = False
    n_groups: int = Field(1, gt=0, le=1 << 16)
    top_groups: int = Field(1, gt=0, le=1 << 16)
    group_best: int = Field(1, gt=0, le=1 << 16)
    score: Score = "softmax"
    normalised: bool = True
    """True if the weights of the chosen experts sum to `scale`. With softmax this is the softmax over only the
    chosen."""
    scale: float = Field(1.0, gt=0)
    """Factor on the summed output of the chosen experts."""
    balance_loss: float = Field(0.01, ge=0)
    z_loss: float = Field(0.0, ge=0)
    balance_rate: float | None = Field(None, ge=0)
    """Step of the selection bias after each optimizer step; 0 for a constant bias, None for no bias."""
    capacity: float | None = Field(None, gt=0)
    """Largest number of tokens that an expert serves in a training pass, as a multiple of its even share; None for no
    limit."""

    @model_validator(mode="after")
    def _fits(self) -> ExpertsConfig:
        check_routing(self.n_experts, self.top_k, self.n_groups, self.top_groups, self.group_best)
        if not self.n_shared and (self.shared_hidden or self.shared_gate):
            raise RequestError(
                "shared_hidden and shared_gate are of the shared experts, and n_shared=0; use n_shared=1",
                code="conflict", field="n_shared", value=0,
            )  # fmt: skip
        if self.clamp is not None and not self.gated:
            raise RequestError(
                "clamp bounds a gate, and gated=False; leave clamp out",
                code="conflict", field="clamp", value=self.clamp,
            )  # fmt: skip
        refuse_clamp(self.clamp, self.activation)
        known = get_args((GluConfig if self.gated else MlpConfig).model_fields["activation"].annotation)
        if self.activation not in known:
            raise RequestError(
                f"activation={self.activation} is for experts with gated={not self.gated}; use {', '.join(known)}",
                code="conflict", field="activation", value=self.activation,
            )  # fmt: skip
        return self

    def n_matrices(self) -> int:
        return 3 if self.gated else 2

    def absorbing(self, new: FFNConfig, hidden: int | None) -> FFNConfig | None:
        like = kind_inside(new)
        return self.replace(hidden=hidden, **like, clamp=self.clamp if like["activation"] == "silu" else None)

    @classmethod
    def replacing(cls, old: FFNConfig | None, **fields: Any) -> FFNConfig | None:
        """Returns a config of experts of the kind of `old`, with the given `fields`; None for an `old` of None. A token
        uses as much weight as before: each of its K experts has 1/K of the width. Raises RequestError for a kind of
        FFN that experts cannot have."""
        if old is None:
            return None
        if type(old) is cls:
            return old.replace(**fields)
        if (like := old.as_experts()) is None:
            raise RequestError(
                f"ffn={old.kind} does not say how experts of its kind are made (as_experts)",
                code="unsupported", field="ffn.kind", value=old.kind,
            )  # fmt: skip
        hidden = fields.pop("hidden", None) or (old.hidden and share_of(old.hidden, fields.get("top_k", 2)))
        return cls(**like, **fields, hidden=hidden)

    def dense(self, hidden: int | None) -> GluConfig | MlpConfig:
        """Returns the config of a single FFN of the experts' kind, of width `hidden`; None for the default width."""
        more = {"clamp": self.clamp} if self.gated else {}
        kind = GluConfig if self.gated else MlpConfig
        return kind(hidden=hidden, activation=self.activation, bias=self.bias, **more)

    def width(self, ctx: BuildContext) -> int:
        return self.hidden or share_of(self.dense(None).width(ctx), self.top_k + self.n_shared)

    def divided(self, ctx: BuildContext, owners: int) -> ExpertsConfig:
        """Returns the config of one tensor-parallel rank's share: shared experts are divided by width, routed experts
        stay whole."""
        shared = (self._shared(ctx).hidden or 0) // owners if self.n_shared else None
        return self.replace(hidden=self.width(ctx), shared_hidden=shared)

    def resolved(self, ctx: BuildContext) -> ExpertsConfig:
        rate = None if self.balance_rate is None else 0.0
        shared = self._shared(ctx).hidden if self.n_shared else None
        one_group = {"top_groups": 1, "group_best": 1} if self.n_groups == 1 else {}
        return self.replace(
            **one_group,
            hidden=self.width(ctx),
            shared_hidden=shared,
            balance_loss=0.0,
            z_loss=0.0,
            balance_rate=rate,
            capacity=None,
        )

    def build(self, ctx: BuildContext) -> Experts:
        reparam = ctx.make_reparam
        router = Router(
            ctx.d_model, self.n_experts, self.top_k, self.score, self.normalised, self.scale, self.balance_loss,
            self.z_loss, self.balance_rate, reparam, self.router_bias, self.n_groups, self.top_groups, self.group_best,
            self.capacity,
        )  # fmt: skip
        shared = self._shared(ctx).build(ctx) if self.n_shared else None
        return Experts(
            ctx.d_model, self.width(ctx), router, self.gated, self.activation, self.bias, shared, reparam, self.clamp,
            self.shared_gate, self.weigh,
        )  # fmt: skip

    def _shared(self, ctx: BuildContext) -> GluConfig | MlpConfig:
        return self.dense(self.shared_hidden or self.n_shared * self.width(ctx))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the experts, k rows for every token. The weights of at least k experts are moved. Beyond
        the tensors that the FFNs keep, the results of the experts, the choice and its weights are kept."""
        d, e, k = ctx.d_model, self.n_experts, self.top_k
        fp32 = torch.promote_types(shape.inputs, torch.float32)
        router = linear_cost(ctx, replace(shape, product_dtype=fp32, input_dtype=fp32), d, e, bias=self.router_bias)
        rows = replace(shape.reading(shape.products), b=k * shape.b)
        one = self.dense(self.width(ctx)).separate_costs(ctx, rows)
        cast = shape.keeps_once((e - 1) * one.parameters) if shape.products != shape.dtype else 0
        filled = filled_rows(shape.products, shape.device, rows.tokens, e) / rows.tokens
        choice = shape.keeps(3 * k, torch.int64) + shape.keeps(e + 2 * k + 3, fp32)
        experts = replace(
            one, parameters=e * one.parameters, active_parameters=k * one.parameters,
            kept=round(filled * one.kept) + cast + shape.keeps(k * d) + choice,
            moved_bytes=one.moved_bytes + (k - 1) * shape.reads(one.parameters),
        )  # fmt: skip
        if not self.n_shared:
            return router + experts
        read_by_both = shape.keeps(d) if shape.inputs == fp32 == shape.products else 0
        shared = self._shared(ctx).costs(ctx, shape) + Cost(kept=-read_by_both)
        if self.shared_gate:  # kept: its logit, the gate and both factors
            gate = linear_cost(ctx, shape, d, 1)
            shared += gate + Cost(kept=shape.keeps(d + 1) - gate.kept)
        return router + experts + shared


def kind_inside(new: FFNConfig) -> dict[str, Any]:
    """Returns the fields `gated` and `activation` of an `ExpertsConfig` whose experts are FFNs of the kind of `new`.
    Raises RequestError for a kind that experts cannot have."""
    if (like := new.as_experts()) is None:
        raise RequestError(
            f"experts cannot be of the kind {new.kind}; give the model another ffn first, or leave out the experts",
            code="conflict", field="ffn.kind", value=new.kind,
        )  # fmt: skip
    return {name: like[name] for name in ("gated", "activation")}


def share_of(hidden: int, experts: int) -> int:
    """Returns the width of each of `experts` experts for which their widths sum to `hidden`, rounded up to a multiple
    of 8."""
    return hidden if experts == 1 else -(-hidden // (8 * experts)) * 8
