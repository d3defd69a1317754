# %% [markdown]
# # An honest comparison
#
# "Our model reaches a lower loss than the baseline." Perhaps. Train the *same* model twice, with another seed, and one
# of the two is lower as well. How often would you have cheered for chance? This tutorial is about the most expensive
# mistake in the field, which costs nothing to make: to stop as soon as the numbers please.
#
# First you play ten thousand comparisons of two *equal* models, where every "significant difference" is false. Then
# you make one real comparison and read its verdict.
#
# *You need the words mean and standard deviation. Fifteen minutes to read, one to run.*

# %% [markdown]
# ## One seed
#
# A seed draws the initial weights and the order of the text, and so the loss has noise. Two arms that share a seed
# share part of it; what counts is their difference, seed by seed. Let us draw such differences for arms that are equal:

# %%
import numpy as np
from scipy import stats

rng = np.random.default_rng(0)
GAMES = 10_000
differences = rng.normal(0.0, 1.0, (GAMES, 8))  # (games, seeds): noise only, the true difference is 0
print(f"one seed: 'our arm is better' in {np.mean(differences[:, 0] < 0):.0%} of the games")

# %% [markdown]
# A coin. With more seeds comes an interval: the mean plus or minus a margin that the seeds themselves give. With few
# seeds it is wide, since three numbers say little about a standard deviation. Student's t says how wide:

# %%


def significant(d):
    """Returns True for each game whose 95 % interval of the mean excludes zero."""
    n = d.shape[1]
    margin = stats.t.ppf(0.975, n - 1) * d.std(axis=1, ddof=1) / n**0.5
    return np.abs(d.mean(axis=1)) > margin


for n in (2, 3, 5, 8):
    reach = stats.t.ppf(0.975, n - 1) / n**0.5
    print(
        f"{n} seeds: interval ± {reach:.1f} standard deviations; false verdicts {np.mean(significant(differences[:, :n])):.1%}"
    )

# %% [markdown]
# The false verdicts are 5 %, as promised, *for any number of seeds*. Then what is wrong with a few seeds? Only that the
# interval is so wide that you find nothing. And what do people do who find nothing?
#
# ## Stopping when it pleases
#
# They add a seed. And look again, and add another, until it is significant or the money is gone. Each look has its 5 %,
# and you take the first that pleases:

# %% alt="False verdicts against the number of seeds: a flat line at five percent for a number fixed before, and a rising line to about fifteen percent for looking after each seed from three on"
import matplotlib.pyplot as plt

seeds = range(3, 9)
fixed = [np.mean(significant(differences[:, :n])) for n in seeds]
seen = np.cumsum([significant(differences[:, :n]) for n in seeds], axis=0) > 0  # significant at some look so far
peeking = seen.mean(axis=1)

figure, axis = plt.subplots(figsize=(5.8, 2.9), layout="constrained")
axis.plot(seeds, 100 * np.array(fixed), "o-", color="tab:green", label="number of seeds fixed before")
axis.plot(seeds, 100 * peeking, "o-", color="tab:red", label="a look after every seed")
axis.set(xlabel="seeds", ylabel="false verdicts, %", ylim=(0, 18))
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
print(f"looking from 3 to 8 seeds: {peeking[-1]:.1%} of equal arms are 'different'")
assert 0.04 < fixed[-1] < 0.06 and 0.12 < peeking[-1] < 0.18

# %% [markdown]
# Three times what was promised, and every single test was done correctly. The remedy is not to look less, but to say
# *before* how often you will look. `gf.compare(..., looks="4,8")` shares the 5 % between both looks; and if you do
# add seeds to a finished comparison, it counts the looks and says what they cost.
#
# ## A real one
#
# Three small models, three seeds each, on English that comes with Python. GPT-2's parts; the same with another
# activation; the same with the norms after the branches, as in 2017.

# %%
from pathlib import Path
from pydoc_data.topics import topics

import glassformer as gf

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
how = {"steps": 40, "batch_size": 8, "context": 32, "tokenizer": "byte"}
how |= {"evaluation_tokens": 4096, "evaluate_every": 40}  # once, at the end
found = gf.compare(
    {"gelu": "gpt2@0.1m", "relu": "gpt2@0.1m+relu", "post": "gpt2@0.1m+post"},
    "help.txt",
    seeds=3,
    loss_alone=True,
    callbacks=[gf.Callback()],  # trains in this process, which is faster for runs of seconds
    progress=False,
    **how,
)
losses = found.to_pandas().pivot(index="seed", columns="name", values="loss")
print(losses.round(3))
for verdict in found.verdicts:
    print(verdict)

# %% [markdown]
# Read the columns downwards: part of the noise belongs to the seed and moves all arms. That is why pairs are compared.
# And read the verdicts to the end. "No difference shown" is not "equal": three seeds of runs this short could not have
# found a small difference.

# %% [markdown]
# ## How many seeds?
#
# To plan, turn the question round: if there *is* a difference of a given size, how often do I find it? That is the
# **power**, and 80 % is the custom. For a difference of one standard deviation:


# %%
def power(n, size):
    """Returns how often n seeds show a difference of `size` standard deviations."""
    critical, noncentrality = stats.t.ppf(0.975, n - 1), size * n**0.5
    return stats.nct.sf(critical, n - 1, noncentrality) + stats.nct.cdf(-critical, n - 1, noncentrality)


for size in (0.5, 1, 2, 4):
    print(f"{size} standard deviations: {next(n for n in range(2, 100) if power(n, size) >= 0.8)} seeds")
assert next(n for n in range(2, 100) if power(n, 1) >= 0.8) == 10

# %% [markdown]
# `gf.compare(..., power="1%")` measures the standard deviation in a small pilot and says the number of seeds and hours.
#
# ## Exercise: the interval that everyone uses
#
# A popular alternative to Student's t is the **bootstrap**: draw three of your three seeds with replacement, take the
# mean, repeat, and give the range of the middle 95 % of these means. **How often does this interval contain the truth,
# with three seeds?** Use the ten thousand games above, where the truth is 0. With three seeds there are only 27 ways to
# draw, so that you can list all of them.

# %% [markdown]
# ### A solution

# %%
from itertools import product

draws = np.array(list(product(range(3), repeat=3)))  # all 27
means = differences[:, :3][:, draws].mean(axis=2)  # (games, 27)
low, high = np.percentile(means, [2.5, 97.5], axis=1)
covered = np.mean((low < 0) & (high > 0))
print(f"the bootstrap's 95 % interval holds in {covered:.0%} of the games")
assert 0.6 < covered < 0.8

# %% [markdown]
# An interval of 95 % that is wrong about one time in three. It is exact for many seeds and of no use for three.

# %% [markdown]
# ## The same as a command
#
# First how many seeds, then the answer; the report names every look.
#
# <!-- not run: takes minutes or hours -->
# ```bash
# glassformer compare gpt2@1m gpt2@1m+relu --data python-docs --tokens 500k --power 1% --out relu
# glassformer compare gpt2@1m gpt2@1m+relu --data python-docs --tokens 500k --tune --seeds 5 --out relu-tuned
# ```
#
# ## Where to go from here
#
# - [How to design an honest comparison](../honest-comparison.md): several arms, equivalence, looks, what the tests miss.
# - [Learning rates](../tuning.md): a baseline at a borrowed rate is half a baseline. [Ladders](../ladders.md).
# - [All claims](../claims.md), each with figures and an interval, among them `gelu-beats-relu` and
#   `post-norm-needs-warmup`.
# - Bouthillier et al. 2021, [2103.03098](https://arxiv.org/abs/2103.03098); Narang et al. 2021,
#   [2102.11972](https://arxiv.org/abs/2102.11972).
