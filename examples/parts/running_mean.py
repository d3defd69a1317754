"""A mixer without attention: y_t = W (x_1 + ... + x_t) / t; x, y (b, s, d). It keeps the sum when it generates."""

import torch

from glassformer.parts.own import (
    Cost,
    Linear,
    Matrix,
    Mixer,
    MixerConfig,
    Pass,
    RecurrentState,
    keys_before,
    linear_cost,
)


class RunningMean(Mixer):
    causal, reach, heads, separates_documents = True, None, None, True

    def __init__(self, d_model):
        super().__init__()
        self.output = Linear(d_model, d_model, role="output")

    def forward(self, x, pass_=None, state=None):
        pass_ = pass_ or Pass.of(x)
        total = x.new_zeros(len(x), 1, x.shape[2]) if state is None else state.begin(pass_, x)[1]["total"]
        means = []
        for i in range(x.shape[1]):
            age = pass_.age[:, i, None, None]  # tokens of the same document before this one, (1 or b, 1, 1)
            total = torch.where(age == 0, 0, total) + x[:, i : i + 1]
            means.append(total / (age + 1))
            if state is not None:
                state.keep({"total": total}, pass_, i + 1)
        return self.output(torch.cat(means, dim=1).to(x.dtype))

    def init_state(self, batch, max_len, dtype, device=None, rewind=0):
        return RecurrentState(batch, {"total": (1, self.output.in_features)}, dtype, device, rewind)

    def matrices(self):
        return {"out": Matrix.of(self.output)}


class RunningMeanConfig(MixerConfig, kind="running_mean", words="running_mean"):
    knows_order = False  # so a model with embedded positions keeps them

    def causal(self, ctx):
        return True

    def reach(self, ctx):  # number of earlier tokens that it reads; None for all
        return None

    def keys_seen(self, ctx, t):
        return keys_before(t, None)

    def heads(self, ctx):
        return None

    def check_training(self, ctx, device):  # raises RequestError for a device on which it cannot train
        pass

    def resized(self, n_heads):
        return self

    def changed(self, change, new):  # the config after a change such as window or gqa; None if it does not apply
        return None

    def build(self, ctx):
        return RunningMean(ctx.d_model)

    def costs(self, ctx, shape):
        held = 0 if shape.phase == "train" else shape.b * ctx.d_model * max(4, shape.state.itemsize)
        return Cost(state_bytes=held, moved_bytes=2 * held) + linear_cost(ctx, shape, ctx.d_model, ctx.d_model)
