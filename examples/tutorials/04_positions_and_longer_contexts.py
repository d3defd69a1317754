# %% [markdown]
# # Positions and longer contexts
#
# *Dog bites man* and *man bites dog* are the same three words. Attention, as you computed it, cannot tell them apart:
# it mixes values by how well keys fit queries, and where a key came from is nowhere in the formula. So every
# transformer needs a part that says who came when. Most of the quarrels about long contexts are quarrels about this
# small part: what happens if a model that was trained on 4,000 tokens is asked to read 16,000?
#
# You see here that attention is blind to order, rotate vectors by hand, train three kinds of positions, and read texts
# four times as long as in training.
#
# *You need [attention by hand](01-attention-by-hand.md). Fifteen minutes to read, one to run.*

# %% [markdown]
# ## Blind to order
#
# Take a model without positions (`nope`) in which every token attends to all others (`bidirectional`), shuffle the
# tokens, and shuffle its answers back: they are the same.

# %%
import torch

import glassformer as gf

SMALL = "llama@0.1m+vocab_size=257+context=64"
tokens = torch.tensor([list(b"dog bites man")])
shuffled = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))
back = shuffled.argsort()
for positions in ("nope", "rope"):
    model = gf.preset(f"{SMALL}+{positions}+bidirectional").build(seed=0).eval()
    with torch.no_grad():
        difference = (model(tokens) - model(tokens[:, shuffled])[:, back]).abs().max()
    print(f"{positions}: largest change of a logit by shuffling {difference:.1e}")
    assert (difference < 1e-5) == (positions == "nope")

# %% [markdown]
# ## Rotation
#
# Nearly all models of today use **RoPE**. It takes the numbers of a query in pairs, sees each pair as a point in the
# plane, and rotates it by an angle that grows with the position: position $p$ turns pair $i$ by $p\,\theta_i$, where
# $\theta_i = 10000^{-2i/h}$ for $h$ numbers. The first pair turns fast, the last hardly at all, like the hands of a
# clock. Keys are rotated the same way.
#
# Why is that clever? The dot product of two arrows depends on the angle *between* them. Rotate one by its position and
# the other by its position, and what remains is the difference of positions: how far apart, no matter where.


# %%
def rotate(x, positions, base=10_000.0):
    """Returns x (tokens, h) with each pair turned by its angle; a pair is number i and number i + h/2."""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half) / half)
    angle = positions[:, None] * theta
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


q, k = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))
for m, n in ((5, 2), (25, 22), (1005, 1002)):
    score = rotate(q, torch.tensor([m])) @ rotate(k, torch.tensor([n])).T
    print(f"query at {m:>4}, key at {n:>4}: score {float(score):.4f}")

# %% [markdown]
# The same to the last digit shown. And the model does what you did: the queries of a model with RoPE are those of the
# model without, rotated.

# %%
seen = {}
for positions in ("nope", "rope"):
    model = gf.preset(f"{SMALL}+{positions}").build(seed=0).eval()
    seen[positions] = gf.capture(model, tokens, "layers.0.mixer.q")["layers.0.mixer.q"][0, :, 0]  # head 0
ours = rotate(seen["nope"], torch.arange(tokens.shape[1]))
assert torch.allclose(ours, seen["rope"], atol=1e-5)

# %% [markdown]
# ## Longer than in training
#
# Now train three models on 32 tokens of context, with three kinds of positions, and let them read up to 128. The text
# is English that comes with Python; we count the loss of the second half of each window, which has context to use.

# %%
from pathlib import Path
from pydoc_data.topics import topics

from glassformer.text import Batches, prepare

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
text = prepare("help.txt", "byte")
how = {"steps": 120, "batch_size": 8, "context": 32, "evaluate_every": 120, "progress": False}


def loss_at(model, length):
    batches = Batches(text.validation, batch=2048 // length, context=length)
    losses = []
    for step in range(4):
        inputs, targets = batches[step]
        with torch.no_grad():
            logits = model(inputs)
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        losses.append(each[:, length // 2 :].mean())
    return float(torch.stack(losses).mean())


lengths = (32, 64, 128)
curves = {}
for positions in ("sinusoidal", "alibi", "rope"):
    run = gf.train(f"llama@0.1m+{positions}", text, out=positions, **how)
    curves[positions] = [loss_at(run.model, length) for length in lengths]
    shown = zip(lengths, curves[positions], strict=True)
    print(f"{positions:11}", "  ".join(f"{length} tokens: {loss:.2f}" for length, loss in shown))

try:
    loss_at(gf.preset("llama@0.1m+learned+vocab_size=257+context=32").build(seed=0), 64)
except gf.RequestError as refused:
    print("learned:", refused)

rise = {name: losses[-1] - losses[0] for name, losses in curves.items()}
assert rise["sinusoidal"] > 0.05 and rise["sinusoidal"] > max(rise["alibi"], rise["rope"])

# %% alt="Loss of a text against its length, trained on 32 tokens: the line of sinusoidal positions rises with the length, those of ALiBi and RoPE stay nearly flat"
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(5.6, 2.9), layout="constrained")
for name, losses in curves.items():
    axis.plot(lengths, losses, "o-", label=name)
axis.axvline(32, color="grey", linestyle="--", linewidth=0.8)
axis.set(xlabel="tokens of the text; trained on 32", ylabel="loss, nats per byte", xticks=lengths)
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Learned positions end with their table, and the model refuses to read on. Sinusoidal positions are *added* to the tokens, and
# places that were never seen disturb. The two that act inside attention survive here.
#
# Do not conclude that RoPE extrapolates. These models are too small and too young to have learned anything that reaches
# far, so there is nothing to break. With more training, the loss at eight times the context rises: the claim
# `rope-extrapolates` was measured, and it [does not hold](../claims.md).
#
# ## Stretching a trained model
#
# If a model has to read further than it was trained for, one changes the angles: `interpolate:4` turns everything four
# times slower, `ntk:4` slows mostly the slow pairs, `yarn:4` leaves the fast ones as they are. Adding it to the name of
# a run is all it takes:

# %%
for change in ("", "+interpolate:4", "+ntk:4", "+yarn:4"):
    loaded = gf.load(f"rope{change}" if change else "rope")
    print(f"rope{change:15} " + "  ".join(f"{length}: {loss_at(loaded.model, length):.2f}" for length in lengths))

# %% [markdown]
# What do they do? A head can only know angles that it has met. Draw, for each pair, the largest angle met in training
# and the largest that a text of four times the length asks for.

# %% alt="Largest angle of each pair of a head: a text four times as long goes beyond the angles of training in every pair, interpolation brings all back, and NTK only the slowest"
half, trained, longer = 16, 32, 128
pairs = torch.arange(half)
theta = 10_000.0 ** (-pairs / half)
stretched = (10_000.0 * 4 ** (half / (half - 1))) ** (-pairs / half)  # NTK: another base, b s^(h / (h - 2))

figure, axis = plt.subplots(figsize=(5.8, 3), layout="constrained")
axis.fill_between(pairs, 1e-3, trained * theta, color="0.88", label="met in training")
axis.semilogy(pairs, longer * theta, "o-", markersize=3, label="4 times the length")
axis.semilogy(pairs, longer * theta / 4, "o-", markersize=3, label="with interpolate:4")
axis.semilogy(pairs, longer * stretched, "o-", markersize=3, label="with ntk:4")
axis.axhline(2 * torch.pi, color="grey", linestyle="--", linewidth=0.8)
axis.text(half - 1, 7, "once round", ha="right", color="grey", fontsize=9)
axis.set(xlabel="pair, from fast to slow", ylabel="largest angle, radians", ylim=(1e-2, 300))
axis.legend(frameon=False, fontsize=8, loc="lower left")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Pairs whose grey reaches above the dashed line went all the way round in training: no angle is new to them. The slow
# pairs, on the right, are the trouble: interpolation brings them all back into the grey, NTK the slowest of them.

# %% [markdown]
# ## Exercise: a straight line
#
# **ALiBi** needs no rotation at all. It subtracts from each score the distance times a slope, a fixed number for each
# head: $2^{-8i/n}$ for head $i = 1 \ldots n$. **Write the matrix of biases** of the first of eight heads for four
# tokens, a row for each query, 0 for keys that come later, and check it against what
# `glassformer explain alibi` prints.

# %% [markdown]
# ### A solution

# %%
slopes = 2.0 ** (-8 * torch.arange(1, 9) / 8)
place = torch.arange(4)
bias = -slopes[0] * (place[:, None] - place[None, :]).clamp(min=0)
print(bias)

printed = [torch.tensor(step.values) for step in gf.explain("alibi").steps]
assert torch.allclose(slopes, printed[0].flatten())
assert torch.allclose(bias, printed[-1])

# %% [markdown]
# ## The same as a command
#
# ```bash
# glassformer explain rope
# glassformer explain alibi
# glassformer plan smollm2+yarn:4
# ```
#
# and `glassformer compare gpt2@3m gpt2@3m+rope gpt2@3m+alibi --data python-docs --tokens 2M --seeds 3 --out positions`, whose
# report has the losses at up to eight times the context.
#
# ## Where to go from here
#
# - [Claims](../claims.md) about positions, measured: `rope-extrapolates`, `rotary-relative`, `permutation-equivariance`,
#   `sinusoid-linear`.
# - [A picture of any position](../readings/position_picture.md). [A window](../parts/window.md), if the far past
#   does not matter.
# - RoPE: [2104.09864](https://arxiv.org/abs/2104.09864). ALiBi: [2108.12409](https://arxiv.org/abs/2108.12409).
#   Interpolation: [2306.15595](https://arxiv.org/abs/2306.15595). YaRN: [2309.00071](https://arxiv.org/abs/2309.00071).
