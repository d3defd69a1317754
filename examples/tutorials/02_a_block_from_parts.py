# %% [markdown]
# # A block from parts
#
# Attention lets tokens talk to each other. That is half of a transformer. The other half is a small network in which
# every token thinks about what it heard, without looking around. Put both into one **block**, stack a few dozen equal
# blocks, and you have GPT, LLaMA or Qwen: they differ in the parts of the block, and hardly in anything else.
#
# In this tutorial you write a LLaMA-style block, and then a whole model, as plain functions of some twenty lines, run
# them with the weights of a built model, and get its logits to the sixth digit. Then you exchange parts by name and
# see what each costs.
#
# *You need [attention by hand](01-attention-by-hand.md). Ten minutes to read, seconds to run.*

# %% [markdown]
# ## A model to take apart
#
# An *expression* names a model. `llama` is the family, `@1m` its size (a million parameters in the layers), and each
# `+` changes one thing: here a vocabulary of bytes, 64 tokens of context, and `nope`, no positions, which are the
# subject of a later tutorial.

# %%
import torch
from torch.nn.functional import silu

import glassformer as gf

NAME = "llama@1m+nope+vocab_size=257+context=64"
model = gf.preset(NAME).build(seed=0).eval()
weights = model.state_dict()
for name, value in weights.items():
    if "layers." not in name or "layers.0." in name:
        print(f"{name:36} {tuple(value.shape)}")

# %% [markdown]
# That is all there is in it: an embedding, four blocks like the one listed, a norm and a head.

# %% [markdown]
# ## Part 1: a norm
#
# Values that pass through many layers grow or shrink unless something holds them. A norm does: it brings each token's
# vector to a root mean square of 1, and then lets the model scale each entry with a learned weight. This one is
# **RMSNorm**, LayerNorm without the subtraction of the mean:
#
# $$\operatorname{norm}(x) = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot w$$


# %%
def norm(x, w):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


# %% [markdown]
# ## Part 2: attention
#
# The four lines of the last tutorial, for several heads at once. One matrix makes queries, keys and values together.


# %%
def attention(x, w_qkv, w_out, heads=4):
    texts, length, d = x.shape
    q, k, v = (x @ w_qkv.T).view(texts, length, 3, heads, d // heads).unbind(2)
    scores = torch.einsum("bsnh,btnh->bnst", q, k) / (d // heads) ** 0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    pattern = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    z = torch.einsum("bnst,btnh->bsnh", pattern, v)
    return z.reshape(texts, length, d) @ w_out.T


# %% [markdown]
# ## Part 3: a feed-forward network
#
# Every token is widened, bent by a nonlinearity, and narrowed again. LLaMA's kind is **SwiGLU**: two wide copies, and
# one of them, through the smooth switch $\operatorname{silu}(a) = a \cdot \sigma(a)$, decides how much of the other
# passes.
#
# $$\operatorname{ffn}(x) = W_{\text{down}} \left(\operatorname{silu}(W_{\text{gate}} x) \odot W_{\text{up}} x\right)$$


# %%
def feed_forward(x, w_gate, w_up, w_down):
    return (silu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T


# %% [markdown]
# ## The wiring
#
# Now connect them. The trick that made deep networks trainable is the **residual connection**: a part does not replace
# its input, it *adds* to it. The vector that runs from the embedding to the head, and to which every part adds, is
# the *residual stream*. Where the norm is placed has a name too: before the part is **pre-norm**, as in nearly all
# models since GPT-2.


# %%
def block(x, layer):
    w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
    x = x + attention(norm(x, w["residual.mixer_norm.weight"]), w["mixer.qkv.weight"], w["mixer.output.weight"])
    ffn = (w["ffn.gate_proj.weight"], w["ffn.up_proj.weight"], w["ffn.down_proj.weight"])
    return x + feed_forward(norm(x, w["residual.ffn_norm.weight"]), *ffn)


def logits(tokens):
    x = weights["embedding.weight"][tokens]  # a row for each token
    for layer in range(4):
        x = block(x, layer)
    return norm(x, weights["final_norm.weight"]) @ weights["head.weight"].T


# %% [markdown]
# Is it the model? Compare the whole, and one place inside.

# %%
tokens = torch.tensor([list(b"The cat sat on the mat")])
with torch.no_grad():
    theirs = model(tokens)
    ours = logits(tokens)
    seen = gf.capture(model, tokens, ["layers.0.resid_pre", "layers.0.resid_post"])

print("largest difference of a logit:", f"{(ours - theirs).abs().max():.1e}")
assert torch.allclose(ours, theirs, atol=1e-5)
assert torch.allclose(block(seen["layers.0.resid_pre"], 0), seen["layers.0.resid_post"], atol=1e-5)

# %% [markdown]
# You have just written a transformer.
#
# ## What it is made of
#
# `gf.plan(..., explain=True)` counts every matrix with its formula, and prints it all. Here are the rows of one layer.
# No weights are made for this, so that it works as well for a model that no computer of yours could hold.

# %%
plan = gf.plan(NAME, explain=True).to_dict()
for row in plan["layers"][0]["rows"]:
    print(f"{row['name']:22} {row['parameters']:>7,} parameters {row['share']:7.1%}   {row['symbols']}")
print(
    "d, f =", plan["symbols"]["d"], plan["symbols"]["f"], " of the whole model:", f"{plan['parameters']:,} parameters"
)
assert plan["parameters"] == sum(value.numel() for value in weights.values())

# %% [markdown]
# Two thirds of a layer are its feed-forward network. Seen as a picture, next to GPT-2 with its two-matrix network:

# %% alt="Stacked bars of the parameters of one layer: in LLaMA and in GPT-2 the feed-forward matrices take about two thirds and attention one third"
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6.6, 2.2), layout="constrained")
greens, greys = plt.cm.Greens, plt.cm.Greys
for row, family in enumerate(("gpt2", "llama")):
    built = gf.preset(NAME.replace("llama", family)).build(seed=0)
    left = 0
    for name, value in built.layers[0].named_parameters():
        if value.ndim == 2:
            shade = (greys if "mixer" in name else greens)(0.35 + 0.15 * (value.shape[0] > value.shape[1]))
            axis.barh(row, value.numel(), left=left, color=shade, edgecolor="white")
            label = name.removesuffix(".weight").removesuffix("_proj").split(".")[-1]
            axis.text(left + value.numel() / 2, row, label, ha="center", va="center", fontsize=9)
            left += value.numel()
axis.set(yticks=[0, 1], yticklabels=["gpt2", "llama"], xlabel="parameters of a layer: attention grey, network green")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Exchange a part
#
# Every part has a name that you can add to an expression: `+layernorm`, `+gelu`, `+mqa`, `+post`. The config of a
# model is a value, and two of them can be compared:

# %%
for path, (mine, theirs) in gf.preset(NAME).diff(gf.preset(NAME + "+mqa+layernorm")).items():
    print(f"{path:40} {mine!s:>10} -> {theirs}")

# %% [markdown]
# What does each exchange cost? All of these train, generate and open in the same way.

# %%
for change in ("", "+layernorm", "+gelu", "+mqa", "+post", "+parallel", "+moe:4:2"):
    config = gf.preset(NAME + change)
    print(
        f"{change or 'as it is':12} {config.num_params():>9,} parameters  {config.state_bytes(64):>7,} bytes of cache"
    )

# %% [markdown]
# ## Exercise: both at once
#
# PaLM, GPT-J and Falcon-7B wire the block in another way: attention and network read the *same* normed input and both
# results are added at once. That is `+parallel`. It saves a norm and lets a GPU do both products together.
#
# **Write `parallel_block(x, layer)`** for the model built below, with your three parts, and check it against what the
# model computes between `resid_pre` and `resid_post`. Print the names of the weights first: one norm is gone.

# %% [markdown]
# ### A solution

# %%
model = gf.preset(NAME + "+parallel").build(seed=0).eval()
weights = model.state_dict()
print([name for name in weights if "layers.0" in name])


def parallel_block(x, layer):
    w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
    normed = norm(x, w["residual.mixer_norm.weight"])
    ffn = (w["ffn.gate_proj.weight"], w["ffn.up_proj.weight"], w["ffn.down_proj.weight"])
    return x + attention(normed, w["mixer.qkv.weight"], w["mixer.output.weight"]) + feed_forward(normed, *ffn)


seen = gf.capture(model, tokens, ["layers.2.resid_pre", "layers.2.resid_post"])
assert torch.allclose(parallel_block(seen["layers.2.resid_pre"], 2), seen["layers.2.resid_post"], atol=1e-5)

# %% [markdown]
# ## The same as a command
#
# ```bash
# glassformer inspect llama@1m --diff gpt2@1m
# glassformer plan llama@1m --explain
# glassformer explain swiglu
# ```
#
# ## Where to go from here
#
# - [Mixers](../mixers.md), [decoders](../kinds/decoder.md), and the [alphabet of shapes](../shapes.md).
# - [Claims](../claims.md) about these parts: `swiglu-beats-gelu`, `rmsnorm-is-faster`, `pre-norm-needs-no-warmup`.
# - RMSNorm: [1910.07467](https://arxiv.org/abs/1910.07467). SwiGLU: [2002.05202](https://arxiv.org/abs/2002.05202).
#   Residual connections: [1512.03385](https://arxiv.org/abs/1512.03385).
