# %% [markdown]
# # A translator
#
# The transformer of 2017 was made to translate. It has two towers: an **encoder** reads the source, where every token
# sees every other, and a **decoder** writes the target, token by token, and at each token chooses what to read of the
# source. Models that continue a prompt have kept only the second tower. This tutorial trains the whole machine,
# small enough for a minute, and draws what it reads while it writes.
#
# The two languages: dates as they are spoken, `14 July 1789`, and dates as ISO 8601 writes them, `1789-07-14`. It is a
# real translation in small: one part is a word for which the number must be known, and the order is turned round.
#
# *You should know what attention is: [attention by hand](01-attention-by-hand.md). Fifteen minutes to read, one to run.*

# %% [markdown]
# ## Two towers
#
# `transformer` is the model of [1706.03762](https://arxiv.org/abs/1706.03762); `+pre` puts the norms before the
# branches, which trains without care, and dropout is for runs longer than ours. There are two stacks of layers, here of
# one layer each, and each layer of the decoder has a **cross-attention**: queries of the target, keys and values of the source,
#
# $$\text{softmax}\!\left(\frac{Q_{\text{target}} K_{\text{source}}^\top}{\sqrt{d}}\right) V_{\text{source}}$$

# %%
import glassformer as gf

MODEL = "transformer@0.1m+pre+residual.dropout=0+embedding.dropout=0"
config = gf.preset(MODEL)
print([block.mixer.kind for block in config.encoder.layers()])
print([block.mixer.kind for block in config.layers()])

# %% [markdown]
# A layer of the decoder is two blocks here: attention to what is written so far, then cross-attention and the FFN. Only
# the decoder is causal; the encoder may look ahead, since the whole source is known before the first token is written.
#
# ## Training
#
# `pairs:dates` makes 20,000 pairs by a rule and holds a tenth out: dates that it is not trained on. `seq2seq` is the
# objective: the loss counts tokens of the target, each predicted from the source and from the *right* tokens before
# it. Tokens are characters.

# %%
run = gf.train(
    MODEL,
    "pairs:dates",
    objective="seq2seq",
    steps=500,
    batch_size=32,
    context=32,
    learning_rate=3e-3,
    evaluation_tokens=4096,
    evaluate_every=250,
    threads=1,
    progress=False,
)
print(f"held-out loss {run.validation['loss']:.3f} nats per token of the targets")

# %%
translator = run.loaded


def translate(sources, **how):
    """Returns the target of each source; the most likely token each time, unless `how` says otherwise."""
    how = {"temperature": 0, "max_new_tokens": 12, **how}
    return [answer.text for answer in translator.generate([""] * len(sources), source=sources, **how)]


for source, target in zip(asked := ["14 July 1789", "3 May 1999", "21 November 2026"], translate(asked), strict=True):
    print(f"{source:>16} -> {target}")

# %% [markdown]
# The prompt is empty: the decoder starts from the token that ends a text, and the source goes to the encoder.
#
# ## How good is it?
#
# Loss per token is a poor judge of a translator. It is measured with the right start given, and an answer is wrong
# if any one of its tokens is. So count the answers without a wrong token: **exact match**. These are new
# dates; of the 200,000 that the rule can draw, the model was trained on fewer than a tenth:

# %%
from datetime import date, timedelta
from random import Random

draw = Random(1)
days = [date(1600, 1, 1) + timedelta(days=draw.randrange(200_000)) for _ in range(200)]
sources = [f"{day.day} {day:%B} {day.year}" for day in days]
targets = [day.isoformat() for day in days]
answers = translate(sources)

exact = sum(a == t for a, t in zip(answers, targets, strict=True)) / len(targets)
print(f"greedy: {exact:.1%} exactly right; the first wrong ones:")
wrong = [i for i in range(len(targets)) if answers[i] != targets[i]]
for i in wrong[:4]:
    print(f"{sources[i]:>18} -> {answers[i]}")
assert exact > 0.5

# %% [markdown]
# ## Greedy or beams
#
# The most likely token now may lead to a less likely text later. **Beam search** keeps the best few starts, extends
# all of them, and ends with the most likely whole text that it has met. Try it on eight dates that went wrong and on
# eight others:

# %%
right = [i for i in range(len(targets)) if answers[i] == targets[i]]
for name, chosen in {"wrong before": wrong[:8], "right before": right[:8]}.items():
    beamed = [translator.generate("", source=sources[i], beams=4, max_new_tokens=12).text for i in chosen]
    print(
        f"{name}: {sum(b == targets[i] for b, i in zip(beamed, chosen, strict=True))} of {len(chosen)} right with beams"
    )

# %% [markdown]
# Beams mend the errors of search, texts that the model itself holds for less likely than another. What it does not know
# they cannot give it. For dates they change nothing; in long sentences, where many words compete, they can.
#
# ## Its reading of the source
#
# Now look inside. The pattern of the cross-attention has a row for each token of the target and a column for each of the
# source: no triangle here, since all of the source may be read at any time. Read a row as: *while it writes this
# character, it reads those*.

# %% alt="Two maps of cross-attention, one a head: rows are the characters of 1789-07-14 as they are written, columns those of 14 July 1789; the first rows are dark at the year at the right, the last ones at the day at the left"
import matplotlib.pyplot as plt
import torch

source, target = "14 July 1789", "1789-07-14"
ids, end = translator.tokenizer.encode, [translator.tokenizer.eos_id]
reader = translator.model.reading(torch.tensor([[*ids(source), *end]]))  # the model with this source
tokens = torch.tensor([[*end, *ids(target)]])
site = "layers.1.mixer.pattern"
pattern = gf.capture(reader, tokens, [site])[site][0]  # (heads, target, source)

figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.1), layout="constrained", sharey=True)
for head, axis in enumerate(axes):
    axis.imshow(pattern[head], cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axis.set(title=f"head {head}", xlabel="reads", xticks=range(len(source) + 1), yticks=range(len(target) + 1))
    axis.set_xticklabels([*source.replace(" ", "\u2423"), "end"])
axes[0].set_yticklabels([*target, "end"])
axes[0].set_ylabel("writes")
year, day = pattern[:, :4, 8:12].sum(-1).mean(), pattern[:, 8:10, :2].sum(-1).mean()
print(f"of its attention, the year's digits are read with {year:.0%}, the day's with {day:.0%}")
assert pattern.sum(-1).allclose(torch.ones(()))

# %% [markdown]
# No label says which part of the source belongs to which part of the target. From pairs only it has learned to
# fetch the year from the end and the day from the front: this is the **alignment** that older translators had as a
# separate part, and the picture of [1409.0473](https://arxiv.org/abs/1409.0473), the first paper with attention. Between
# the two, while it writes the month, see the letters that it reads, and think of how June differs from July.
#
# The map explains the errors too. All four wrong dates above have two neighbouring digits of the year exchanged, and at
# the third and the fourth digit both heads read several digits at once: this small model has not yet learned to point.
#
# A head need not read the very character that it copies: the encoder has mixed the characters, and a neighbour may
# carry the news. So the map is a hint, not a proof; [patching](../howto/patch-activations.md) is the proof.
#
# ## Exercise: BLEU by hand
#
# Of a sentence there is more than one right translation, so that exact match is of no use for languages. **BLEU**
# ([Papineni et al. 2002](https://aclanthology.org/P02-1040/)) counts what is shared. For $n$ from 1 to 4, let $p_n$ be
# the share of the answers' n-grams that occur in their reference, each no more often than there, with numerator and
# denominator added up over all answers; let $c$ and $r$ be the numbers of tokens of all answers and of all references.
#
# $$\text{BLEU} = 100 \cdot \min\left(1, e^{1 - r/c}\right) \cdot (p_1\, p_2\, p_3\, p_4)^{1/4}$$
#
# **Compute it for the 200 answers above**, with characters as tokens, and compare with sacrebleu, which papers use.

# %% [markdown]
# ### A solution

# %%
from collections import Counter
from math import exp, prod

from sacrebleu import corpus_bleu


def grams(text, n):
    """Returns how often each n-gram of characters occurs."""
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))


shares = []
for n in range(1, 5):
    pairs = [(grams(a, n), grams(t, n)) for a, t in zip(answers, targets, strict=True)]
    shares.append(sum((a & t).total() for a, t in pairs) / sum(a.total() for a, _ in pairs))
c, r = (sum(map(len, texts)) for texts in (answers, targets))
bleu = 100 * min(1, exp(1 - r / c)) * prod(shares) ** (1 / 4)
theirs = corpus_bleu(answers, [targets], tokenize="char").score
print(f"by hand {bleu:.2f}, sacrebleu {theirs:.2f}; {exact:.1%} exactly right")
assert abs(bleu - theirs) < 0.01

# %% [markdown]
# BLEU is kinder than exact match: an answer with one wrong digit has most of its n-grams right. That is why both are
# reported, and why a BLEU means nothing without how its tokens were cut.

# %% [markdown]
# ## The same as a command
#
# A run with a folder also answers 500 held-out sources and reports exact match, BLEU and chrF; `inspect --source` makes
# a page with the map of every head.
#
# <!-- not run: takes minutes -->
# ```bash
# glassformer train transformer@0.1m+pre --data pairs:dates --objective seq2seq --steps 500 --batch-size 32 --context 32 --lr 3e-3 --out dates
# glassformer generate dates --source "14 July 1789" --temperature 0
# glassformer generate dates --source "14 July 1789" --beams 4
# glassformer inspect dates --source "14 July 1789" --text "1789-07-14"
# ```
#
# ## Where to go from here
#
# - [Translate](../howto/translate.md): your own pairs, messages of programs in many languages, published translators.
# - [Encoder-decoders](../kinds/encoder-decoder.md): their wiring, the checkpoints that load, English to Chinese.
# - [Objectives](../objectives.md): what else two towers can learn, such as filling in missing text (T5, BART).
# - Vaswani et al. 2017, [1706.03762](https://arxiv.org/abs/1706.03762); Bahdanau et al. 2014,
#   [1409.0473](https://arxiv.org/abs/1409.0473).
