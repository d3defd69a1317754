"""An objective with smoothed labels: (1 - share) (-log p(target)) + share mean_v(-log p(v)). Szegedy et al. 2015."""

from pydantic import Field
from torch.nn import functional as F

from glassformer.training.objectives import NextTokenConfig


class SmoothedConfig(NextTokenConfig, kind="smoothed"):
    values = ("share",)  # smoothed:0.2 sets it

    share: float = Field(0.1, ge=0, lt=1)

    def loss(self, model, batch, reduction="mean"):
        if reduction == "none":  # held-out losses stay those of other objectives
            return super().loss(model, batch, reduction)
        logits = model(batch.inputs, **batch.beside).float()  # (b, s, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), label_smoothing=self.share)
