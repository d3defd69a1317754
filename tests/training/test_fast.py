"""A loop of one's own inside `fast_training` computes what `train` computes, as fast."""

from __future__ import annotations

import pytest
import torch

import glassformer as gf
from glassformer import machine
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts import region
from glassformer.text import Batches, TextData
from glassformer.training import AdamWConfig, train
from glassformer.training.gradients import clip, gradient_norm
from tests.training.test_loop import BATCH, CONTEXT, SMALL, TEN


def test_user_loop_equals_train_bit_for_bit(text: TextData) -> None:
    """Ten plain steps, at a constant rate: the losses and weights of `train`, bit for bit."""
    schedule = {"kind": "constant", "warmup": 0}
    run = train(preset(f"llama@1m{SMALL}"), text, {**TEN, "schedule": schedule, "learning_rate": 1e-3})
    losses = []
    with gf.fast_training(threads=1, compile=False) as how:
        model = run.config.build(seed=0).to(how.device).train()
        optimizer = AdamWConfig().create(model, 1e-3, 0.1)
        batches = Batches(text.train, BATCH, CONTEXT, 0)
        for step in range(10):
            inputs, targets = batches[step]
            with how.autocast():
                loss = model.loss(inputs, targets)
            loss.backward()
            clip(model.parameters(), 1.0, gradient_norm(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses == [row["loss"] for row in run.metrics if "loss" in row]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), run.model.parameters(), strict=True))


def test_settings_hold_inside_and_not_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.device, "can_compile", lambda device: True)
    kept: list[bool] = []
    monkeypatch.setattr(machine.defaults, "keep_freed_memory", lambda: kept.append(True) or True)
    before = torch.get_num_threads()
    with gf.fast_training("cpu", "float32", threads=before + 1) as how:
        assert (how.device, how.dtype, how.compile) == ("cpu", "float32", True)
        assert torch.get_num_threads() == before + 1 and region.compiling_regions() and kept
    assert torch.get_num_threads() == before and not region.compiling_regions()
    with pytest.raises(RequestError), gf.fast_training(dtype="float8"):
        pass
