# %% [markdown]
# # A run that dies, and why
#
# Sooner or later a training run of yours will die. The loss falls, falls, and jumps; or it turns into `nan` on a
# Sunday at four in the morning. The usual reaction is to halve the learning rate and hope. But a dying run leaves
# traces: some statistic moved *first*, in some layer, at some step, and the loss only followed.
#
# Here you kill a run on purpose, read its traces, ask `gf.why` what it died of, and apply what it proposes.
#
# *You need to have trained something once. Ten minutes to read, one to run.*

# %% [markdown]
# ## Kill it
#
# The victim is a tiny GPT-2 with the norms *after* each branch, as in 2017, which is known to be touchy. We give it a
# learning rate a hundred times too high. `watch=4` records statistics of every layer at every fourth step.

# %%
from pathlib import Path
from pydoc_data.topics import topics

import glassformer as gf

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")  # English that comes with Python
how = {"steps": 60, "batch_size": 8, "context": 32, "tokenizer": "byte", "evaluation_tokens": 4096, "watch": 4}

dead = gf.train("gpt2@0.1m+post", "help.txt", learning_rate=1.0, out="dead", progress=False, **how)
print(dead.status, "after", dead.steps, "steps:", dead.error)
assert dead.status == "diverged"

# %% [markdown]
# The run did not crash, and it did not burn electricity for nothing either: it was stopped, with a reason.
#
# ## What would you guess?
#
# Here is the loss, as you would see it on a screen. It tells you *that* something is wrong. The records know more: at
# each fourth step, what every head and every matrix did. On the right, the largest attention logit of each head, the
# number that enters its softmax.

# %% alt="Left, the loss of the run on a logarithmic axis: it rises from 5 to above 100 nats within a few steps. Right, the largest attention logit of four heads, above 1,000 from the fourth step on, over a dashed line at 100"
import matplotlib.pyplot as plt

rows = [row for row in gf.dynamics.read_records(Path("dead/dynamics.jsonl")) if "statistics" in row]
steps = [row["step"] for row in rows if "max_attention_logit" in row["statistics"]]
logits = [row["statistics"]["max_attention_logit"] for row in rows if "max_attention_logit" in row["statistics"]]
losses = [(row["step"], row["loss"]) for row in dead.metrics if "loss" in row]

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
left.semilogy(*zip(*losses, strict=True), color="black")
left.set(xlabel="step", title="loss, nats per byte")
for layer in range(2):
    for head in range(2):
        right.semilogy(
            steps, [one[f"layers.{layer}.mixer"][head] for one in logits], label=f"layer {layer} head {head}"
        )
right.axhline(100, color="grey", linestyle="--", linewidth=0.8)
right.set(xlabel="step", title="largest attention logit")
right.legend(frameon=False, fontsize=8)
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# A logit of a thousand means a softmax that is certain, and a softmax that is certain learns nothing more. Healthy
# heads stay far below the dashed line. But was that the cause, or did something push them there?

# %% [markdown]
# ## Ask why
#
# `gf.why` reads the records of the run, compares every statistic with its own past, and matches the pattern with known
# ways to die, each with its paper.

# %%
diagnosis = gf.why("dead")
print("\n".join(diagnosis.story))

# %% [markdown]
# The causes as values, the most certain first. Each names the statistic that moved, where, and at which step.

# %%
for cause in diagnosis.causes[:3]:
    print(f"{cause.confidence:4.0%} {cause.cause}: {cause.statistic} of {cause.site}, step {cause.step}")
    print("     try", ", ".join(cause.tries))
first = diagnosis.causes[0]
assert "learning rate" in first.cause and first.confidence > 0.5

# %% [markdown]
# So the certain heads are a symptom, next in line. The disease is the step that the optimizer takes: at this rate one
# step moves the weights by many times their size.
#
# ## Apply the proposal
#
# What `tries` holds are pieces of an expression, of the model or of its recipe. So the rescue is a plus sign. It is a
# proposal and not a promise: run it and see.

# %%
proposal = first.tries[0]
revived = gf.train(f"gpt2@0.1m+post+{proposal}", "help.txt", out="revived", progress=False, **how)
falling = [row["loss"] for row in revived.metrics if "loss" in row]
print(f"{proposal}: {revived.status}, loss {falling[0]:.2f} -> {falling[-1]:.2f}")
assert revived.status != "diverged" and falling[-1] < falling[0] - 1

# %% [markdown]
# ## Exercise: dead on arrival
#
# Not every run dies of its learning rate. A colleague's model starts with a loss that is *higher than that of a blind
# guess*, which for 257 different bytes is $\ln 257$. Before anything was learned, it is already sure of wrong things.
#
# **Build such a run and find out what it is.** Train `gpt2@0.1m+init.std=1` for 12 steps at the usual rate, compute the
# loss of a blind guess, and ask `gf.why`.

# %% [markdown]
# ### A solution

# %%
from math import log

born = gf.train("gpt2@0.1m+init.std=1", "help.txt", out="born", progress=False, **{**how, "steps": 12, "watch": 1})
start = next(row["loss"] for row in born.metrics if "loss" in row)
print(f"first loss {start:.1f} nats, a blind guess {log(257):.2f}")
answer = gf.why("born")
for cause in answer.causes[:2]:
    print(f"{cause.confidence:4.0%} {cause.cause}: {cause.why}")
assert start > log(257) + 1
assert any("initial" in cause.cause for cause in answer.causes)

# %% [markdown]
# ## The same as a command
#
# ```bash
# glassformer train gpt2@0.1m+post --data number-words --steps 60 --batch-size 8 --context 32 --lr 1 --watch --watch-every 4 --out dead || true
# glassformer why dead
# ```
#
# ## Where to go from here
#
# - [All failures that `why` knows](../statistics/diagnose.md), and [every statistic](../under_glass.md) with what trouble
#   looks like: [attention logits](../statistics/max_attention_logit.md), [entropy](../statistics/attention_entropy.md),
#   [update ratios](../statistics/update_ratio.md).
# - [Training dynamics, measured](../dynamics.md). [Claims](../claims.md): `post-norm-needs-warmup`,
#   `pre-norm-needs-no-warmup`, `qk-norm-holds-high-rates`.
# - Entropy collapse: [2303.06296](https://arxiv.org/abs/2303.06296). Post-norm and warm-up:
#   [2002.04745](https://arxiv.org/abs/2002.04745).
