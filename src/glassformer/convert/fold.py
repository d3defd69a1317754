"""The matrices that a model applies, written out."""

from __future__ import annotations

import torch

from glassformer.model import Model
from glassformer.parts.head import Head
from glassformer.parts.linear import Linear


@torch.no_grad()
def fold(model: Model) -> Model:
    """The same function with plain linear maps: W_hat takes the place of W and of what makes W_hat from it.

    A model that holds its matrices as they are is returned itself; otherwise a new one, which shares all other weights.
    """
    if model.config.reparam is None:
        return model
    weights = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, (Linear, Head)) and module.reparam is not None:
            weights[f"{path}.weight"] = module.applied()
            for name in module.reparam.state_dict():
                del weights[f"{path}.reparam.{name}"]
    plain = model.config.vary(reparam=None).outline()
    plain.load_state_dict(weights, assign=True)
    plain.ends = model.ends
    return plain.train(model.training)
