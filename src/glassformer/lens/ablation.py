"""Importance of heads: the change of a measure when one head is ablated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError, WorkError
from glassformer.introspection import rows_of
from glassformer.lens import style
from glassformer.lens.edits import mean_over_tokens
from glassformer.lens.passes import SAME, Metric, OnPass, by_loss, by_metric, outcomes
from glassformer.lens.reading import Reading
from glassformer.lens.tables import draw_table, figure_size, heads_of, strongest, table_of
from glassformer.model import Model
from glassformer.parts.core.running import Edit


@dataclass(frozen=True, eq=False, repr=False)
class HeadAblation(Reading):
    """Change (layers, heads) of the measure when a head is ablated, relative to `base`, the measure of the whole model.
    NaN if a layer has no such head."""

    title: ClassVar[str] = "Head ablation"

    change: Float[Tensor, "l n"]
    base: float
    of: str
    """Name of the measure: "loss", in mean nats per token, or "metric"."""
    by: Literal["zero", "mean"]

    def __str__(self) -> str:
        lines = [f"{self.of} {self.base:.4f}; change without a head ({self.by} ablation), largest first"]
        largest = strongest(self.change, 5, signed=True)
        return "\n".join([*lines, *(f"layer {layer}, head {head}: {value:+.4f}" for layer, head, value in largest)])

    def figure(self, width: float | None = None, height: float | None = None) -> Any:
        """Returns a matplotlib figure of `width` x `height` inches, by default as large as the table needs."""
        wide, high = figure_size(self.change)
        return super().figure(width or wide, height or high)

    def draw(self, figure: Any) -> None:
        ax = style.axes(figure, title=f"Without one head ({self.by})", x="head", y="layer")
        unit = " (nats)" if self.of == "loss" else ""
        draw_table(ax, self.change, label=f"change of the {self.of}{unit}", signed=True)


def head_ablation(
    model: Model,
    tokens: Int[Tensor, "b s"],
    metric: Metric | None = None,
    by: Literal["zero", "mean"] = "zero",
    progress: OnPass | None = None,
) -> HeadAblation:
    """Returns the change of the loss on `tokens`, or of `metric(logits)`, when each head is ablated separately.

    by="zero": the head's z is 0; by="mean": its mean over all of `tokens` (`gf.lens.ablate_heads`). A metric returns a
    number, or one for each row, of logits (b, s, v). Michel et al. 2019, 1905.10650. A head without effect is not
    necessarily idle: others may do its work once it is gone (self-repair; McGrath et al. 2023, 2307.15771).

    Copies of the text share a pass, with another head ablated in each; `progress(done, of)` is called after every pass.
    Raises RequestError for tokens that the model cannot read, and for a model without heads."""
    tokens = rows_of(model, tokens, least=1 if metric else 2)
    if by not in ("zero", "mean"):
        raise RequestError(f"by={by!r}: use 'zero' or 'mean'", code="unknown", field="by", value=by)
    put = torch.zeros_like if by == "zero" else mean_over_tokens

    def without(head: int) -> Edit:
        def edited(z: Tensor) -> Tensor:
            one = slice(head, head + 1)
            z[:, :, one] = put(z[:, :, one])
            return z

        return edited

    of = "metric" if metric else "loss"
    counts = heads_of(model, "mixer.z")
    changes = [(f"layers.{layer}.mixer.z", without(head)) for layer, n in enumerate(counts) for head in range(n)]
    measure = by_metric(model, metric) if metric else by_loss(model)
    base, *rest = outcomes(model, tokens, [SAME, *changes], measure, progress)
    if not base.isfinite():
        raise WorkError(f"the {of} of the whole model is {base:g}: there is nothing to compare with", code="diverged")
    found = iter(torch.stack(rest).split([n for n in counts if n]))
    change = table_of([next(found) - base if n else None for n in counts])
    return HeadAblation(change, float(base), of, by)
