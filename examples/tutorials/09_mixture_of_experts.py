# %% [markdown]
# # Mixture of experts, and where tokens go
#
# A larger network knows more, and it costs more for every token. Unless a token does not have to pass all of it. In a
# **mixture of experts** the feed-forward network is replaced by many of the same kind, and a small *router* decides,
# token by token, which two of them are used. The others cost nothing but memory. So a model can have four times the
# parameters for the same work, and nearly all the largest models of today are built like this.
#
# It sounds like a committee of specialists. What the experts actually specialise in, and what happens if the router has
# favourites, you see here with your own eyes.
#
# *You need [a block from parts](02-a-block-from-parts.md). Ten minutes to read, one to run.*

# %% [markdown]
# ## What is paid and what is stored
#
# Mixtral has eight experts in each layer and uses two for each token.

# %%
import torch
from torch.nn.functional import silu

import glassformer as gf

plan = gf.plan("mixtral-8x7b")
print(f"stored: {plan.parameters:,} parameters")
print(f"used for one token: {plan.active_parameters:,}, {plan.active_parameters / plan.parameters:.0%}")
assert plan.active_parameters < 0.3 * plan.parameters

# %% [markdown]
# "8x7B" is not 56 billion, because only the feed-forward networks are there eight times: attention and embeddings are
# shared.
#
# ## Routing by hand
#
# The router is one small matrix. It gives each expert a score for the token, softmax turns the scores into
# probabilities, the best two are kept and scaled to the sum 1, and their answers are mixed with these weights:
#
# $$y = \sum_{i \in \text{best } 2} w_i \, E_i(x), \qquad w_i = \frac{p_i}{\sum_{j \in \text{best } 2} p_j}$$
#
# In an expression this is `+moe:4:2`: four experts, two for each token, each of half the usual width, so that a token
# costs what it cost before.

# %%
model = gf.preset("llama@0.1m+moe:4:2+vocab_size=257+context=64").build(seed=0).eval()
tokens = torch.tensor([list(b"The cat sat on the mat")])
seen = gf.capture(model, tokens, ["layers.0.resid_mid", "layers.0.ffn.*"])
weights = model.layers[0].ffn.state_dict()

x = seen["layers.0.resid_mid"][0]
x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)  # RMSNorm, whose weights are still 1
gate, up, down = (weights[f"{name}_proj.weight"].chunk(4) for name in ("gate", "up", "down"))  # one for each expert

p = torch.softmax(x @ weights["router.weight"].T, dim=-1)  # (tokens, experts)
best = p.topk(2)
share = best.values / best.values.sum(-1, keepdim=True)
y = torch.zeros_like(x)
for token in range(len(x)):
    for expert, part in zip(best.indices[token].tolist(), share[token], strict=True):
        hidden = silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
        y[token] += part * (down[expert] @ hidden)

assert torch.allclose(p, seen["layers.0.ffn.router"][0], atol=1e-5)
assert torch.allclose(y, seen["layers.0.ffn.out"][0], atol=1e-5)
print("first token goes to experts", best.indices[0].tolist(), "with weights", [round(float(s), 2) for s in share[0]])

# %% [markdown]
# ## Favourites
#
# Nothing in this formula says that the experts are used equally. An expert that is a little better is chosen more
# often, learns more, and becomes better still: the rich get richer, and in the end most of the network is dead weight.
# So training adds a small loss that is lowest when the load is even. Here are two runs, with it and without it. Half
# of the cure is to *see* the disease: the **load** of an expert is its share of all choices.

# %%
from pathlib import Path
from pydoc_data.topics import topics

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")  # English that comes with Python
how = {"steps": 80, "batch_size": 8, "context": 32, "tokenizer": "byte", "evaluation_tokens": 4096}
arms = {"without balance": "+ffn.balance_loss=0", "with balance": "+ffn.balance_loss=0.05"}
runs = {
    name: gf.train(f"llama@0.1m+moe:8:2{change}", "help.txt", learning_rate=0.02, progress=False, **how)
    for name, change in arms.items()
}

sentence = "The list is sorted in place, and the method returns None. If an error occurs, it is raised.\n"
readings = {}
for name, run in runs.items():
    text = torch.tensor(run.tokenizer.encode(sentence))[None]
    readings[name] = gf.lens.expert_routing(run.model, text, tokenizer=run.tokenizer)
    largest = [round(load, 2) for load in readings[name].load.amax(-1).tolist()]
    print(f"{name}: loss {run.validation['loss']:.3f}; largest load of each layer {largest}")

# %% alt="Bars of the load of eight experts in two layers, without and with a balance loss, with a dashed line at an even eighth"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(6.8, 2.6), layout="constrained", sharey=True)
for layer, axis in enumerate(axes):
    for shift, (name, reading) in zip((-0.2, 0.2), readings.items(), strict=True):
        axis.bar(torch.arange(8) + shift, reading.load[layer], width=0.4, label=name)
    axis.axhline(1 / 8, color="black", linestyle="--", linewidth=0.8)
    axis.set(title=f"layer {layer}", xlabel="expert", xticks=range(8))
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("share of the tokens")
axes[0].legend(frameon=False, fontsize=8)

# %% [markdown]
# The dashed line is an even load; one sentence is a small sample, and no bar meets it exactly. Without the loss for
# balance, two of eight experts do nearly all the work in each layer, and most others have died: they get no tokens, so
# they learn nothing, so they get no tokens. The loss of the whole model is worse for it, too.
#
# ## What do they specialise in?
#
# Ask which tokens each expert of a layer gets most. These tokens are bytes, so that we read letters.

# %%
print(readings["with balance"])

# %% [markdown]
# No expert for verbs and none for jokes. In small models, and in Mixtral too by its authors' account, experts
# specialise in the *shape* of tokens (spaces, capitals, vowels) more than in subjects.

# %% [markdown]
# ## Exercise: how unfair is it?
#
# Papers measure the imbalance by **MaxVio**: how much more than its even share the busiest expert gets, 0 if all are
# equal and $e - 1$ if one of $e$ experts takes everything. **Compute it from the router's probabilities** of a layer:
# choose the best two of each token, count, and compare with `violation` of the reading.

# %% [markdown]
# ### A solution

# %%
run, reading = runs["without balance"], readings["without balance"]
text = torch.tensor(run.tokenizer.encode(sentence))[None]
p = gf.capture(run.model, text, "layers.0.ffn.router")["layers.0.ffn.router"][0]
counts = torch.bincount(p.topk(2).indices.flatten(), minlength=8)
violation = float(counts.max() / counts.double().mean() - 1)
print("counts", counts.tolist(), f"MaxVio {violation:.2f}")
assert abs(violation - float(reading.violation[0])) < 1e-3

# %% [markdown]
# ## The same as a command
#
# ```bash
# glassformer plan mixtral-8x7b
# glassformer explain moe
# ```
#
# and, after a training run, `glassformer inspect RUN --text "..." --reading expert_routing`.
#
# ## Where to go from here
#
# - [Experts](../parts/experts.md) and [experts that choose their tokens](../parts/expert_choice.md): formulas, costs, when they lose.
# - [Where the tokens of a text go](../readings/expert_routing.md); in training, [the load](../statistics/router_load.md),
#   [MaxVio](../statistics/max_violation.md) and [the router's entropy](../statistics/router_entropy.md).
# - [Experts over several machines](../experts.md): what an uneven load costs there.
# - [Claims](../claims.md): `switch-loss`, `experts-active`.
# - Shazeer et al. 2017, [1701.06538](https://arxiv.org/abs/1701.06538); Mixtral, [2401.04088](https://arxiv.org/abs/2401.04088);
#   balance without a loss, [2408.15664](https://arxiv.org/abs/2408.15664).
