# %% [markdown]
# # Your own scaling law
#
# Suppose that you may spend a certain amount of compute, once. Should you train a large model on little text, or a
# small model on much? The answer is worth millions, and it is read off a curve: train many *small* models, fit a
# formula to their losses, and follow it to where you cannot afford to try.
#
# The formula most used is Chinchilla's. It says that a loss has three parts: what no model can know about text, what
# this model is too small for, and what it has read too little for:
#
# $$L(N, D) = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}}$$
#
# with $N$ parameters and $D$ tokens. Here you fit it to data whose truth you know, then to nine small models that you
# train yourself, and see how far each can be trusted.
#
# *You need logarithms. Fifteen minutes to read, one or two to run.*

# %% [markdown]
# ## A law whose truth is known
#
# Never fit a law to data before you have fitted it to data that you made. These are losses by the constants that
# Besiroglu and others found for Chinchilla's runs in 2024, with one part in a thousand of noise.

# %%
import numpy as np

import glassformer as gf

truth = {"E": 1.8172, "A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658}
rng = np.random.default_rng(0)


def loss_of(n, d):
    return truth["E"] + truth["A"] * n ** -truth["alpha"] + truth["B"] * d ** -truth["beta"]


rows = [
    {"N": n, "D": d, "loss": loss_of(n, d) * np.exp(0.001 * rng.normal())}
    for n in (7e7, 2e8, 5e8, 1.5e9, 5e9)
    for d in (2e9, 6e9, 2e10, 6e10, 2e11)
]
law = gf.fit_scaling_law(rows)
for name, value in truth.items():
    print(f"{name:6} true {value:9.4f}, fitted {law.values[name]:9.4f}")
assert abs(law.values["alpha"] - truth["alpha"]) < 0.03 and abs(law.values["beta"] - truth["beta"]) < 0.03

# %% [markdown]
# The exponents are recovered. $A$ and $B$ look much worse, and it does not matter: a slightly different exponent and a
# quite different amplitude draw nearly the same curve. Never compare the $A$ of two papers.
#
# ## Spend it well
#
# Training costs about $6 N D$ operations. Along a line of equal compute, a larger model reads fewer tokens, and
# somewhere in between is the lowest loss:

# %% alt="Loss against the number of parameters for three budgets of compute: three valleys, the minimum of each further right and lower, joined by a dashed line"
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
sizes = np.geomspace(1e8, 3e10, 200)
best = []
for flops in (1e20, 1e21, 1e22):
    axis.loglog(sizes, law.predict(sizes, flops / 6 / sizes, far=True), label=f"{flops:.0e} FLOPs")
    n, d = law.optimal(flops)
    best.append((n, law.predict(n, d)))
    print(f"{flops:.0e} FLOPs: {n / 1e9:5.2f}B parameters on {d / 1e9:6.0f}B tokens, {d / n:.0f} tokens a parameter")
axis.loglog(*zip(*best, strict=True), "k--o", markersize=4)
axis.set(xlabel="parameters", ylabel="loss, nats per token")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Some twenty tokens for each parameter: that is where the rule of thumb comes from.
#
# ## Nine models that you train
#
# Now the real thing, as small as it gets: three sizes, three budgets, on English that comes with Python. Each run has
# a schedule of its length. (A checkpoint on the way of a longer run does not do, because its learning rate is
# still high.)

# %%
from pathlib import Path
from pydoc_data.topics import topics

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
how = {
    "batch_size": 8,
    "context": 32,
    "tokenizer": "byte",
    "evaluation_tokens": 4096,
    "evaluate_every": 1000,
    "progress": False,
}
mine = []
for size in ("0.03m", "0.1m", "0.3m"):
    for steps in (30, 60, 120):
        run = gf.train(f"llama@{size}", "help.txt", steps=steps, **how)
        n = run.config.num_params(embeddings=False)
        mine.append({"N": n, "D": run.tokens, "loss": run.validation["loss"]})
        print(f"{n:>8,} parameters, {run.tokens:>6,} tokens: {run.validation['loss']:.3f}")

# %% [markdown]
# Does a law fit to eight of them know the ninth, the largest?

# %%
largest = mine[-1]
small_law = gf.fit_scaling_law(mine[:-1])
predicted = small_law.predict(largest["N"], largest["D"], far=True)
error = predicted / largest["loss"] - 1
print(f"predicted {predicted:.3f}, trained {largest['loss']:.3f}: off by {error:+.1%}")
print({name: round(value, 3) for name, value in small_law.values.items()})
assert abs(error) < 0.25

# %% [markdown]
# Check the exponents before you publish them. Eight points hold five numbers loosely, and our sizes and budgets
# each span only a factor of ten or less. The prediction of a *neighbour* may be good; it is the far
# away that punishes a wrong exponent. That is why `glassformer scale` prints an interval with every number, and refuses to
# predict more than ten times beyond the largest run unless you insist.
#
# ## Exercise: the optimum by hand
#
# For a given compute $C = 6 N D$ the best $N$ has a closed form. Put $D = C / 6N$ into the law, set the derivative by
# $N$ to zero, and you find
#
# $$N^* = \left(\frac{\alpha A}{\beta B}\right)^{\frac{1}{\alpha + \beta}} \left(\frac{C}{6}\right)^{\frac{\beta}{\alpha + \beta}}$$
#
# **Compute it** for the first law and $C = 10^{21}$, and compare with `law.optimal`. Then: if compute grows tenfold,
# how much should the model grow, and how much the text?

# %% [markdown]
# ### A solution

# %%
v = law.values
share = v["beta"] / (v["alpha"] + v["beta"])
n_best = (v["alpha"] * v["A"] / (v["beta"] * v["B"])) ** (1 / (v["alpha"] + v["beta"])) * (1e21 / 6) ** share
print(f"by hand {n_best / 1e9:.3f}B, by the program {law.optimal(1e21)[0] / 1e9:.3f}B")
print(f"ten times the compute: model x {10**share:.2f}, text x {10 ** (1 - share):.2f}")
assert abs(n_best / law.optimal(1e21)[0] - 1) < 0.01
assert abs(share - v["a"]) < 1e-6  # the program calls it a

# %% [markdown]
# Both by about the root of ten. Kaplan and others had found in 2020 that nearly all should go into the model; the
# difference was largely in how runs were scheduled and counted, and it changed how large models are built.
#
# ## The same as a command
#
# A grid of two architectures, trained, fitted and compared; and a law of any table of runs:
#
# <!-- not run: takes minutes or hours -->
# ```bash
# glassformer scale gpt2 llama --data python-docs --sizes 0.1m..1.6m --budgets 250k..4M --out scaling
# glassformer scale --data runs.csv --flops 1e21 --predict 7b --out law.html
# ```
#
# ## Where to go from here
#
# - [Scaling laws](../scaling.md): all forms, intervals, a grid that was run, and one that follows no law. [Its
#   page](../example/scaling.html).
# - [Claims](../claims.md) about scaling, measured. [An honest comparison](../honest-comparison.md).
# - Chinchilla: [2203.15556](https://arxiv.org/abs/2203.15556); its replication:
#   [2404.10102](https://arxiv.org/abs/2404.10102); Kaplan: [2001.08361](https://arxiv.org/abs/2001.08361).
