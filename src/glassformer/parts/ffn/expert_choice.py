"""Experts that choose their tokens, where a router would let tokens choose their experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.site import Site
from glassformer.parts.core.words import Word
from glassformer.parts.ffn.base import ACTIVATIONS, FFN, FFNConfig
from glassformer.parts.ffn.experts import Router, check_routing, kind_inside, read_experts, share_of
from glassformer.parts.ffn.glu import GluConfig, gating
from glassformer.parts.ffn.mlp import MlpConfig
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import GroupedLinear, Matrix, linear_cost
from glassformer.parts.reparam import MakeReparam


class ExpertChoice(FFN):
    """Mixture of experts in which every expert takes its c tokens of highest affinity, c = ceil(s k / e): all have
    equal load without a balance loss, and a token has k experts on average, possibly none. Zhou et al. 2022,
    2202.09368.

        p = softmax(x W^T)    I_i = the c tokens of largest p_i    y_t = sum over the i with t in I_i of p_ti E_i(x_t)

    x, y (b, s, d), p (b, s, e), I (b, e, c); E_i as in `Experts`. The choice depends on all tokens of the text, so it
    is **not causal**: next-token training would leak the target, and a decoding step would choose from a single token
    (see the paper's section on limitations). Both are refused. Each text of a batch is separate.

    Sites: affinity (p), and out.
    """

    causal = False
    separates_documents = False

    def __init__(
        self,
        d_model: int,
        hidden: int,
        n_experts: int,
        top_k: int,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        reparam: MakeReparam | None = None,
    ):
        super().__init__()
        e, self.top_k = n_experts, top_k
        self.router = Router(d_model, e, top_k, normalised=False, reparam=reparam)
        self.gate_proj = GroupedLinear(e, d_model, hidden, bias, reparam=reparam) if gated else None
        self.up_proj = GroupedLinear(e, d_model, hidden, bias, reparam=reparam)
        self.down_proj = GroupedLinear(e, hidden, d_model, bias, role="output", reparam=reparam)
        self.activation: Callable[..., Tensor] = gating(activation) if gated else ACTIVATIONS[activation]
        self.affinity, self.out = Site("bse"), Site()

    def matrices(self) -> dict[str, Matrix]:
        """Returns the weight matrices by name; those of the experts count as divided into heads, one for each
        expert."""
        maps = {"gate": self.gate_proj, "up": self.up_proj, "down": self.down_proj}
        own = {
            name: Matrix(linear.weight, 0, len(linear.weight), len(linear.outs), linear)
            for name, linear in maps.items()
            if linear is not None
        }
        return {"router": Matrix.of(self.router), **own}

    def forward(self, x: Float[Tensor, "b s d"], pass_: Pass | None = None) -> Float[Tensor, "b s d"]:
        return self.out(self.mix(x, *self.take(self.affinity(self.router.score(self.router(x))))))

    def take(self, p: Float[Tensor, "b s e"]) -> tuple[Float[Tensor, "b e c"], Int[Tensor, "b e c"]]:
        """Returns (weights, indices), (b, e, c) each, of the c tokens that every expert takes, from the affinities
        p."""
        count = taken_of(p.shape[1], self.top_k, p.shape[2])
        by_expert = p.transpose(1, 2)
        taken = by_expert.detach().topk(count, dim=-1).indices
        return by_expert.gather(-1, taken), taken

    def mix(self, x: Float[Tensor, "b s d"], weights: Tensor, taken: Tensor) -> Float[Tensor, "b s d"]:
        """Returns the output of the mixture for the tokens `taken` and their `weights` (b, e, c). All experts have
        equally many rows, so their matrices are factors of one batched matmul."""
        (b, s, d), e = x.shape, taken.shape[1]
        at = (taken + s * torch.arange(b, device=x.device)[:, None, None]).transpose(0, 1).reshape(e, -1)
        rows = x.flatten(0, 1)[at]  # (e, b c, d)
        up = _each(self.up_proj, rows)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(_each(self.gate_proj, rows), up)
        y = _each(self.down_proj, hidden)
        y = (y * weights.transpose(0, 1).reshape(e, -1, 1)).to(y.dtype)
        return y.new_zeros(b * s, d).index_add(0, at.flatten(), y.flatten(0, 1)).view(b, s, d)

    def naive_mix(self, x: Float[Tensor, "b s d"], weights: Tensor, taken: Tensor) -> Float[Tensor, "b s d"]:
        """Returns the output of the mixture by its definition: every expert computes every token, with weight 0 for
        tokens that it did not take."""
        y = torch.zeros_like(x)
        shares = weights.new_zeros(*taken.shape[:2], x.shape[1]).scatter(-1, taken, weights)  # (b, e, s)
        for i in range(taken.shape[1]):
            maps = [linear for linear in (self.gate_proj, self.up_proj) if linear is not None]
            y = y + shares[:, i, :, None] * _one(self.down_proj, i, self.activation(*(_one(m, i, x) for m in maps)))
        return y


def taken_of(s: int, k: int, e: int) -> int:
    """Returns c = ceil(s k / e), the number of the s tokens that each of e experts takes, for k experts per token on
    average."""
    return min(s, math.ceil(s * k / e))


def _each(linear: GroupedLinear, rows: Float[Tensor, "e r i"]) -> Float[Tensor, "e r o"]:
    """Returns the product of each expert's rows (r, i) with its matrix in `linear`, (e, r, o)."""
    y = torch.bmm(rows, linear.maps().transpose(1, 2))
    return y if linear.bias is None else y + linear.bias.to(y.dtype).view(len(linear.outs), 1, -1)


def _one(linear: GroupedLinear, i: int, x: Tensor) -> Tensor:
    y = x @ linear.maps()[i].T
    return y if linear.bias is None else y + linear.bias.view(len(linear.outs), -1)[i]


class ExpertChoiceConfig(FFNConfig, kind="expert_choice", words=Word("expert_choice", read_experts, "8:2")):
    """y_t = sum of p_ti E_i(x_t) over the experts i that take token t; each takes the ceil(s k / e) tokens of largest
    p_i. Zhou et al. 2022, 2202.09368.

    For bidirectional models. It loses for next-token prediction: the choice depends on future tokens, and is refused;
    and a token that no expert takes passes unchanged.
    """

    causal: ClassVar[bool] = False

    n_experts: int = Field(8, gt=0, le=1 << 16)
    top_k: int = Field(2, gt=0, le=1 << 16)
    """Mean number k of experts per token: the paper's capacity factor."""
    gated: bool = True
    activation: Literal["sigmoid", "relu", "gelu", "gelu_tanh", "silu", "relu2"] = "silu"
    bias: bool = False

    @model_validator(mode="after")
    def _fits(self) -> ExpertChoiceConfig:
        check_routing(self.n_experts, self.top_k, 1, 1, 1)
        self.dense(None)
        return self

    def n_matrices(self) -> int:
        return 3 if self.gated else 2

    def absorbing(self, new: FFNConfig, hidden: int | None) -> FFNConfig | None:
        return self.replace(hidden=hidden, **kind_inside(new))

    @classmethod
    def replacing(cls, old: FFNConfig | None, **fields: object) -> FFNConfig | None:
        """Returns a config of experts of the kind of `old`, each with 1/`top_k` of the width of `old`, as
        `ExpertsConfig.replacing` does."""
        if old is None or type(old) is cls:
            return old and old.replace(**fields)
        if (like := old.as_experts()) is None:
            raise RequestError(
                f"ffn={old.kind} does not say how experts of its kind are made (as_experts)",
                code="unsupported", field="ffn.kind", value=old.kind,
            )  # fmt: skip
        hidden = fields.pop("hidden", None) or (old.hidden and share_of(old.hidden, int(str(fields.get("top_k", 2)))))
        return cls(**{**like, **fields, "hidden": hidden})

    def dense(self, hidden: int | None) -> GluConfig | MlpConfig:
        """Returns the config of a single FFN of the experts' kind, of width `hidden`; None for the default width."""
        kind = GluConfig if self.gated else MlpConfig
        return kind(hidden=hidden, activation=self.activation, bias=self.bias)

    def divided(self, ctx: BuildContext, owners: int) -> ExpertChoiceConfig:
        """Returns the config of one tensor-parallel rank's share, with the default width filled in: ranks divide whole
        experts, not the hidden layer."""
        return self.replace(hidden=self.width(ctx))

    def width(self, ctx: BuildContext) -> int:
        return self.hidden or share_of(self.dense(None).width(ctx), self.top_k)

    def build(self, ctx: BuildContext) -> ExpertChoice:
        return ExpertChoice(
            ctx.d_model, self.width(ctx), self.n_experts, self.top_k, self.gated, self.activation, self.bias,
            ctx.make_reparam,
        )  # fmt: skip

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the cost of the experts: c rows of each expert in every sequence; the weights of all experts are
        moved."""
        e, k = self.n_experts, self.top_k
        fp32 = torch.promote_types(shape.inputs, torch.float32)
        wide = Shape(**{**vars(shape), "product_dtype": fp32, "input_dtype": fp32})
        count = taken_of(shape.s, k, e)
        rows = Shape(**{**vars(shape.reading(shape.products)), "b": shape.b * e, "s": count, "t": max(count, shape.t)})
        one = self.dense(self.width(ctx)).separate_costs(ctx, rows)
        cast = shape.keeps_once((e - 1) * one.parameters) if shape.products != shape.dtype else 0
        taken = rows.keeps(2, torch.int64) + rows.keeps(1, fp32) + shape.keeps(e, fp32)  # indices, weights; all p
        kept = one.kept + cast + taken + rows.keeps(2 * ctx.d_model)  # before and after the weights
        return linear_cost(ctx, wide, ctx.d_model, e) + Cost(
            parameters=e * one.parameters, active_parameters=k * one.parameters, flops=one.flops, kept=kept,
            kept_selective=one.kept_selective, moved_bytes=one.moved_bytes + (e - 1) * shape.reads(one.parameters),
        )  # fmt: skip
