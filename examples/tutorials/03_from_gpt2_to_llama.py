# %% [markdown]
# # From GPT-2 to LLaMA in seven rungs
#
# Between the first transformers and the models of today there are about seven changes. Each has a paper and a reason,
# and together they are called "modern". But what does *each* of them do? If you swap all seven at once you learn only
# whether the sum helps. So we climb a **ladder**: one change at a time, each rung trained on the same text as the rung
# before, with the same seeds, and the difference written down with its noise.
#
# The models here are tiny and see about ten thousand tokens. That is enough to see the method. It is not enough to see
# small effects, and the page shows that too.
#
# *You need [a block from parts](02-a-block-from-parts.md). Fifteen minutes to read, one or two to run.*

# %% [markdown]
# ## The rungs
#
# | rung | change | why people do it |
# |---|---|---|
# | 0 | | GPT-2's parts with the norm *after* each branch, as in 2017 |
# | 1 | `+pre` | the norm before the branch: deep stacks train without a long warm-up |
# | 2 | `+rope` | positions by rotating queries and keys, instead of a learned vector for each place |
# | 3 | `+rmsnorm` | a norm without the mean and the bias: less to compute |
# | 4 | `+swiglu` | a gated feed-forward network, of equally many weights |
# | 5 | `+nobias` | no biases in the linear layers |
# | 6 | `+untied` | separate matrices for embedding and head |
# | 7 | `+gqa:1` | query heads share one KV head: a smaller cache |
#
# Names on a ladder add up, and the last one is LLaMA:

# %%
import torch

import glassformer as gf

BASE = "gpt2@0.1m+post"
CHANGES = ["", "+pre", "+rope", "+rmsnorm", "+swiglu", "+nobias", "+untied", "+gqa:1"]
rungs = [BASE + "".join(CHANGES[: n + 1]) for n in range(len(CHANGES))]
print(rungs[-1])
print("left to LLaMA:", gf.preset(rungs[-1]).diff(gf.preset("llama@0.1m+gqa:1")))

# %% [markdown]
# Nothing is left but a small constant in the norms, and vocabulary and context, which training takes from the text. (`gf.ablate("gpt2@1m", data, to="llama@1m")` finds such changes by
# itself.)
#
# ## What each rung costs
#
# Costs need no training. Parameters are counted without the embedding, whose size is a matter of the vocabulary; the
# cache is what a token leaves behind when the model writes.

# %%
for change, rung in zip(CHANGES, rungs, strict=True):
    config = gf.preset(rung)
    cache = config.state_bytes(2) - config.state_bytes(1)
    print(f"{change or BASE:15} {config.num_params(embeddings=False):>8,} parameters {cache:>6} bytes of cache a token")

# %% [markdown]
# Only two rungs change a cost that anyone would notice: `+untied`, in the embeddings, and `+gqa:1`, which halves the
# cache of these two-headed models.
#
# ## What each rung does to the loss
#
# Every rung is trained with two seeds on a text that comes with Python, the pages of its `help()`.

# %%
from pathlib import Path
from pydoc_data.topics import topics

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
how = {"steps": 40, "batch_size": 8, "context": 32, "tokenizer": "byte"}
how |= {"evaluation_tokens": 4096, "evaluate_every": 40}  # once, at the end
losses = torch.tensor([
    [gf.train(rung, "help.txt", seed=seed, progress=False, **how).validation["loss"] for seed in range(2)]
    for rung in rungs
])  # fmt: skip
steps = losses[1:] - losses[:-1]  # each rung minus the rung before, seed by seed
noise = (steps[:, 0] - steps[:, 1]).abs().median() / 2**0.5  # how far two seeds differ, as a standard deviation
for change, loss, step in zip(CHANGES, losses, [None, *steps], strict=True):
    moved = "" if step is None else f"{step.mean():+.3f} (seeds {step[0]:+.3f}, {step[1]:+.3f})"
    print(f"{change or BASE:15} loss {loss.mean():.3f}  {moved}")
print(f"two seeds of a step differ by about {noise:.3f}")

# %% alt="Bars of the change of the loss at each of seven rungs with a dot for each of two seeds: most are near zero within the grey band of the noise"
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6.6, 3), layout="constrained")
names = CHANGES[1:]
axis.axhspan(-2 * float(noise), 2 * float(noise), color="0.9", label="two standard deviations of the noise")
axis.bar(names, steps.mean(1), width=0.5, color="tab:green")
axis.plot(names, steps, "o", color="black", markersize=4)
axis.axhline(0, color="black", linewidth=0.8)
axis.set(ylabel="change of the loss, nats per byte")
axis.legend(frameon=False, fontsize=8)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Below zero is better. Compare each bar with the grey band before you believe it. Whatever sticks out of the band is a
# candidate; whatever is inside is *not shown*, which is not the same as "no effect". At a larger size, with forty times the
# text and tuned learning rates, [our measured ladder](../ladders.md) finds that rotary positions do most, and that what
# the four changes after them do is within its noise too. Most of "modern" is there for speed, memory and stability.
#
# And all seven together?

# %%
whole = losses[-1] - losses[0]
print(f"all seven together: {whole.mean():+.3f} (seeds {whole[0]:+.3f}, {whole[1]:+.3f})")

# %% [markdown]
# ## Exercise: does the order matter?
#
# A rung is judged by what came before it. **Take `+rope` out of the finished LLaMA** and put learned positions back,
# `+learned`. Is what you lose at the top what you won at rung 2? If it is not, the change acts together with others. Train
# both seeds and compare.

# %% [markdown]
# ### A solution

# %%
without = torch.tensor([
    gf.train(rungs[-1] + "+learned", "help.txt", seed=seed, progress=False, **how).validation["loss"]
    for seed in range(2)
])  # fmt: skip
at_the_top = losses[-1] - without  # what rotary positions change as the last of all changes
print(f"+rope as rung 2: {steps[1].mean():+.3f}; as the last of all: {at_the_top.mean():+.3f}; noise {noise:.3f}")
changed = gf.preset(rungs[-1] + "+learned").diff(gf.preset(rungs[-1]))
assert changed and all("position" in path for path in changed)  # nothing else was changed
assert at_the_top.shape == (2,) and torch.isfinite(at_the_top).all()

# %% [markdown]
# ## The same as a command
#
# `glassformer ablate` trains the ladder in both directions, with three seeds and intervals that hold together, and
# writes a page; the second command is the experiment of the repository, tuned, which takes hours.
#
# <!-- not run: takes minutes or hours -->
# ```bash
# glassformer ablate gpt2@0.3m --to llama@0.3m --data python-docs --tokens 300k --out ladder
# glassformer run recipes/gpt2-to-llama.yaml
# ```
#
# ## Where to go from here
#
# - [Ladders](../ladders.md), with a factorial design for changes that act together; [a finished
#   page](../example/ladder.html).
# - [Decoders](../kinds/decoder.md): what each published model is made of. [Learning rates](../tuning.md).
# - [Claims](../claims.md) about single rungs: `pre-norm-needs-no-warmup`, `rmsnorm-loses-nothing`, `swiglu-beats-gelu`,
#   `tied-head-loses-nothing`, `gqa-cache`.
# - Most changes do not transfer between codebases: Narang et al. 2021, [2102.11972](https://arxiv.org/abs/2102.11972).
