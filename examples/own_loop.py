"""A custom training loop: the model is an `nn.Module`, and a batch is two tensors."""

import argparse

import torch

import glassformer as gf
from glassformer.text import Batches, prepare

text = prepare(argparse.__file__)  # any text file; this one is on every machine
batches = Batches(text.train, batch=8, context=64)
model = gf.preset(f"llama@0.3m+vocab_size={text.tokenizer.vocab_size}+context=64").build(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(8):  # inside `with gf.fast_training():` a long loop is as fast as `gf.train`
    inputs, targets = batches[step]  # (b, s) each
    loss = model.loss(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
