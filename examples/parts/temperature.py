"""Attention with a learned temperature for each head."""

import torch
from torch import nn

from glassformer.parts.mixer.attention import Attention, AttentionConfig
from glassformer.parts.own import Cost


class TemperatureAttention(Attention):
    def own(self, d_model, bias, reparam):  # called at the end of the constructor
        self.log_temperature = nn.Parameter(torch.empty(self.n_heads))

    def init_weights(self, init):
        self.log_temperature.data.zero_()

    def call(self, q, k, v, k_idx, pass_):
        return super().call(q * self.log_temperature.exp()[:, None], k, v, k_idx, pass_)


class TemperatureAttentionConfig(AttentionConfig, kind="temperature_attention", words="temperature"):
    def module(self):
        return TemperatureAttention

    def costs(self, ctx, shape):
        return super().costs(ctx, shape) + Cost.weights(self.n_heads)
