# %% [markdown]
# # Attention by hand
#
# Read this sentence: *The cat sat on the mat because it was tired.* To know that "it" is the cat, you looked back.
# A model that reads one token at a time has to look back too, and **attention** is how a transformer does it: each
# token asks a question, every token before it offers an answer, and the token takes away a mixture of the answers,
# most of it from those that fit the question best.
#
# That is the whole idea. Here you compute it with your own hands for three tokens, in four lines, and then check that
# a complete language model does nothing else.
#
# *You need Python, and to know what a matrix product is. Ten minutes to read, seconds to run.*

# %% [markdown]
# ## Three tokens
#
# A model never sees words. It sees a vector for each token, and here are three of them, as short as can be: "cat",
# "sat" and "mat", four numbers each.

# %%
import torch

import glassformer as gf

torch.set_printoptions(precision=4, sci_mode=False)

x = torch.tensor([
    [1.0, 0.0, 0.0, 0.0],  # cat
    [0.0, 1.0, 0.0, 0.0],  # sat
    [0.0, 0.0, 1.0, 0.0],  # mat
])  # fmt: skip

# %% [markdown]
# Each token plays three parts. It *asks* (its query $q$), it *advertises* what it knows (its key $k$), and it *hands
# over* what it knows (its value $v$). A matrix makes each of the three from the same vector. In a trained model these
# matrices have been learned; ours are random, from a fixed seed, so that your numbers are our numbers.

# %%
torch.manual_seed(42)
w_q, w_k, w_v = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
q, k, v = x @ w_q, x @ w_k, x @ w_v
print(q)

# %% [markdown]
# ## Four lines
#
# How well does a key fit a query? Take their dot product: it is large where both point the same way. With all queries
# and all keys at once that is one matrix product, a table with a row for each token that asks and a column for each
# token that answers. Then softmax turns each row into shares, and the shares mix the values:
#
# $$\text{weights} = \operatorname{softmax}\left(\frac{Q K^T}{\sqrt{d_k}}\right), \qquad Z = \text{weights} \cdot V$$

# %%
scores = q @ k.T  # (3 queries, 3 keys): how well each key fits each query
scores = scores / 4**0.5  # divided by the root of the length of a key
weights = torch.softmax(scores, dim=-1)  # every row is positive and has the sum 1
z = weights @ v  # a mixture of values for each token

print(weights)

# %% [markdown]
# Read the first row aloud: "cat" takes four tenths of its answer from itself, nearly nothing from "sat", and more
# than half from "mat". Every row is a recipe for a mixture.
#
# Did we get it right? `glassformer explain attention` prints the same example step by step. (Some guides print other
# weights for this seed, such as 0.4084, 0.2869, 0.3047 in the first row. Run their code and it gives ours.)

# %%
steps = {step.name: torch.tensor(step.values) for step in gf.explain("attention").steps}
assert torch.allclose(weights, steps["weights = softmax(scores)"], atol=1e-6)
assert torch.allclose(z, steps["z = weights v"], atol=1e-6)
assert not torch.allclose(weights[0], torch.tensor([0.4084, 0.2869, 0.3047]), atol=0.1)

# %% [markdown]
# ## No peeking
#
# A language model learns to predict the next token. If "sat" could see "mat", it would only have to copy. So the
# scores of later tokens are set to minus infinity before the softmax, which makes their weights exactly zero. This is
# the **causal mask**, and it is one line:

# %%
later = torch.ones(3, 3, dtype=torch.bool).triu(1)  # True above the diagonal: the key comes after the query
causal = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
print(causal)

# %% [markdown]
# "cat" comes first, so all it can do is attend to itself: its row is 1, 0, 0. The last row has not changed, because
# "mat" could see everything anyway. As pictures:

# %% alt="Two heat maps of three by three weights: without a mask every cell is filled, with the causal mask the cells above the diagonal are empty"
import matplotlib.pyplot as plt

words = ["cat", "sat", "mat"]
figure, axes = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
for axis, table, title in zip(axes, (weights, causal), ("without a mask", "causal"), strict=True):
    axis.imshow(table, cmap="Greens", vmin=0, vmax=1)
    axis.set(title=title, xlabel="answers (key)", ylabel="asks (query)")
    axis.set(xticks=range(3), yticks=range(3), xticklabels=words, yticklabels=words)
    for row in range(3):
        for column in range(3):
            value = float(table[row, column])
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black")

# %% [markdown]
# ## Why divide by the root?
#
# A dot product of long vectors is a sum of many terms, and such sums spread: for random numbers the variance is the
# length $d$. Softmax of widely spread scores picks one winner and gives all others nothing, and where a softmax is
# that sure it has almost no gradient to learn from. Dividing by $\sqrt{d}$ keeps the spread at 1 for any length:

# %%
for d in (4, 64, 1024):
    many_q, many_k = torch.randn(1000, d), torch.randn(8, d)
    raw = many_q @ many_k.T
    scaled = raw / d**0.5
    winner = [float(torch.softmax(one, dim=-1).amax(-1).mean()) for one in (raw, scaled)]
    print(f"d = {d:>4}: variance {raw.var():7.1f}, largest of 8 weights {winner[0]:.2f}; scaled: {winner[1]:.2f}")

# %% [markdown]
# ## A real model does the same
#
# A model has several **heads**: copies of what you did, side by side, each with shorter vectors and its own matrices.
# Here is a small GPT-2 with random weights. `gf.capture` shows what its first layer computes; four lines of ours, with
# a letter for each axis, give the same for all its heads.

# %%
config = gf.preset("gpt2@0.3m+vocab_size=257+context=64")
model = config.build(seed=0).eval()
tokens = torch.tensor([list(b"The cat sat on the mat")])  # a token for each byte

seen = gf.capture(model, tokens, "layers.0.mixer.*")
q, k, v = (seen[f"layers.0.mixer.{name}"] for name in "qkv")
print("q:", tuple(q.shape), "= (texts, tokens, heads, numbers)")

length, width = q.shape[1], q.shape[3]
scores = torch.einsum("bsnh,btnh->bnst", q, k) / width**0.5
scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
weights = torch.softmax(scores, dim=-1)
z = torch.einsum("bnst,btnh->bsnh", weights, v)

assert torch.allclose(weights, seen["layers.0.mixer.pattern"], atol=1e-6)
assert torch.allclose(z, seen["layers.0.mixer.z"], atol=1e-6)
print("the model's weights are ours, in all", q.shape[2], "heads")

# %% [markdown]
# ## Exercise: a sliding window
#
# Reading a book, you rarely need the exact words of a hundred pages ago. Mistral's first model let each token attend
# to the last 4,096 only. **Write the mask of a window of two**: every token attends to itself and to the token right
# before it. Put it into the four lines above and compare with the same model built as `+window:2`, whose weights you
# find as before.
#
# Try it before you read on. One hint: `triu` has a brother, `tril`.

# %% [markdown]
# ### A solution
#
# Forbidden is what comes after the query, as before, and also what is two or more tokens before it.

# %%
windowed = gf.preset("gpt2@0.3m+vocab_size=257+context=64+window:2").build(seed=0).eval()
seen = gf.capture(windowed, tokens, "layers.0.mixer.*")
q, k = seen["layers.0.mixer.q"], seen["layers.0.mixer.k"]

every = torch.ones(length, length, dtype=torch.bool)
forbidden = every.triu(1) | every.tril(-2)
scores = torch.einsum("bsnh,btnh->bnst", q, k) / width**0.5
answer = torch.softmax(scores.masked_fill(forbidden, -torch.inf), dim=-1)

assert torch.allclose(answer, seen["layers.0.mixer.pattern"], atol=1e-6)
assert int((answer[0, 0, -1] > 0).sum()) == 2  # the last token attends to two

# %% [markdown]
# ## The same as a command
#
# The example in numbers, and the claims of this page measured:
#
# ```bash
# glassformer explain attention
# glassformer claims score-variance dictionary-lookup softmax-stable
# ```
#
# ## Where to go from here
#
# - [Attention](../parts/attention.md): what it costs, when it loses; [a window](../parts/window.md); [all the ways to
#   mix tokens](../mixers.md).
# - [Attention maps](../readings/attention_maps.md) of a trained model.
# - [Claims](../claims.md) with measurements: `score-variance`, `dictionary-lookup`, `attention-quadratic`.
# - Vaswani et al. 2017, *Attention Is All You Need*, [1706.03762](https://arxiv.org/abs/1706.03762).
