from __future__ import annotations

from contextlib import AbstractContextManager

from glassformer.dynamics.qk_clip import QKClip
from glassformer.dynamics.watch import Moment
from glassformer.training.callbacks.base import Callback
from glassformer.training.state import Training


class ClipQK(Callback):
    """Callback that bounds attention logits by the limit `recipe.qk_clip`: it scales down W_q and W_k
    (`dynamics.QKClip`)."""

    def __init__(self, run: Training):
        self.clip = QKClip(run.model, run.recipe.qk_clip)

    def around_backward(self, run: Training) -> AbstractContextManager[None]:
        return self.clip.looking()

    def after_update(self, run: Training, moment: Moment) -> None:
        self.clip.after_update()
