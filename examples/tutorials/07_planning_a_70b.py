# %% [markdown]
# # Planning a 70B before renting it
#
# A node of eight H100 costs tens of dollars an hour. It is a poor place to find out that the model does not
# fit, and a worse one to find out on day 40 that the training takes 160. Nearly all of it can be known before, with a
# pencil: how many parameters, how many bytes, how many operations, how long at best.
#
# You do that here for Llama-2-70B, by hand and with `gf.plan`, without a GPU and without a byte of its weights.
#
# *You need multiplication, and [a block from parts](02-a-block-from-parts.md) for the names of the matrices. Ten minutes to
# read, seconds to run.*

# %% [markdown]
# ## How many parameters?
#
# A model is an expression, and its config knows all sizes. Each layer has four matrices of attention (two of them
# narrow, because eight KV heads are shared by 64 query heads), three of the feed-forward network, and two norms.

# %%
import glassformer as gf

config = gf.preset("llama-2-70b")
block = config.stack[0].blocks[0]
layers, d, f, vocabulary = config.stack[0].repeat, config.d_model, block.ffn.hidden, config.vocab_size
kv = block.mixer.n_kv_heads * d // block.mixer.n_heads  # width of all keys of a token

attention = 2 * d * d + 2 * kv * d  # queries and output, keys and values
network = 3 * f * d  # gate, up, down
parameters = layers * (attention + network + 2 * d) + d + 2 * vocabulary * d

plan = gf.plan("llama-2-70b")
print(f"{layers} layers of width {d}: {parameters:,} parameters by hand, {plan.parameters:,} planned")
assert parameters == plan.parameters

# %% [markdown]
# ## How many bytes?
#
# Two for each parameter in bfloat16, half a byte in 4 bits. That is only the weights. A model that writes also keeps
# the keys and values of every token it has read, the **cache**: in each layer a key and a value of `kv` numbers.

# %%
per_token = layers * 2 * kv * 2  # a key and a value, two bytes each
print(f"weights in bfloat16: {2 * parameters / 1e9:.0f} GB; cache: {per_token:,} bytes a token")
assert plan.weight_bytes == 2 * parameters and plan.state_bytes_per_token == per_token

# %% [markdown]
# A third of a megabyte for one token. For one reader that is nothing, for many readers of long texts it is everything:

# %% alt="Memory against the number of readers, a line for bfloat16 weights and one for 4-bit weights, each rising by 1.3 GB a reader, with dashed lines at one, two and four H100"
import matplotlib.pyplot as plt

readers = range(0, 129, 8)
figure, axis = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
for weights, colour in (("bfloat16", "tab:green"), ("int4", "tab:blue")):
    plans = [gf.plan("llama-2-70b", weights=weights, batch=max(1, n), context=4096) for n in readers]
    axis.plot(readers, [one.bytes / 1e9 for one in plans], color=colour, label=f"weights in {weights}")
for gpus in (1, 2, 4):
    axis.axhline(80 * gpus, color="grey", linestyle="--", linewidth=0.8)
    axis.text(128, 80 * gpus + 3, f"{gpus} H100", ha="right", color="grey", fontsize=9)
axis.set(xlabel="readers at once, 4,096 tokens each", ylabel="GB", ylim=(0, 350), xlim=(0, 130))
axis.legend(frameon=False, loc="lower right")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## How fast does it write?
#
# To write one token, a GPU reads all weights and all caches once. Bytes divided by bandwidth is a time that nothing
# can beat; on eight H100, with 3.35 TB/s each, and eight readers:

# %%
served = gf.plan("llama-2-70b", machine="h100:8", batch=8, context=4096)
floor = served.bytes_read / (8 * 3.35e12)
low, high = served.decoding.seconds
print(f"read: {served.bytes_read / 1e9:.0f} GB, at best {1000 * floor:.1f} ms a token for each reader")
print(f"planned: {1000 * low:.1f} to {1000 * high:.1f} ms, {8 / high:.0f} to {8 / low:.0f} tokens a second in all")
assert floor < low < high

# %% [markdown]
# The plan gives a range, since real kernels reach a part of the bandwidth; which part comes from measured runs
# ([planning](../planning.md) lists them, with the errors). Speed is bought in bytes: 4-bit weights are
# read in a quarter of the time.
#
# ## What does training it take?
#
# Adam keeps, for each parameter, the weight, its gradient and two averages, four bytes each: 16 bytes before a single
# token is read.

# %%
one = gf.plan("llama-2-70b", train=True, batch=1, context=4096, recompute="full")
states = {name: one.memory[name] / 1e9 for name in ("weights", "gradients", "optimizer", "activations")}
print({name: f"{size:,.0f} GB" for name, size in states.items()})
assert abs(sum(states.values()) - 16 * parameters / 1e9) < 0.03 * 16 * parameters / 1e9

# %% [markdown]
# 1.1 terabytes: so the states have to be divided between many GPUs. The operations are easier still. Each token costs
# about 6 per parameter, 2 in the forward pass and 4 backward. With the 20 tokens a parameter that Chinchilla
# recommends:

# %%
tokens = 20 * parameters
operations = 6 * parameters * tokens
print(f"{tokens / 1e12:.2f}T tokens, {operations:.2e} operations")
print(f"on 128 H100 at their full 989 TFLOP/s: {operations / (128 * 989.5e12) / 86400:.0f} days")

trained = gf.plan(
    "llama-2-70b",
    train=True,
    machine="h100:8",
    nodes=16,
    batch=1024,
    micro_batch=2,
    recompute="full",
    tokens="1.38T",
)
print(f"planned: {trained.run.low / 86400:.0f} to {trained.run.high / 86400:.0f} days, MFU {trained.time.mfu:.0%}")
print(f"memory of a GPU: {trained.memory['needed'] / 1e9:.0f} of 80 GB")
low, high, currency = trained.run.cost()
print(f"cost: {low / 1e6:.1f} to {high / 1e6:.1f} million {currency}")
assert trained.fits and 2 < trained.run.seconds / (operations / (128 * 989.5e12)) < 3.5

# %% [markdown]
# Nearly three times the pencil's days. MFU is the share of the peak that does useful work, and a pencil takes it for 1.
# Part of the rest is work done twice: `recompute="full"` computes activations again in the backward pass, and is why
# they fit. `print(trained)` shows all of it, and says what would be faster.

# %% [markdown]
# ## Exercise: one GPU
#
# You rent a single H100 with 80 GB and store the weights in 4 bits. **How many tokens of context can one reader have?**
# Do it with a pencil first: what is left of the memory after the weights, divided by the bytes of a token. Leave a
# tenth of the memory free. Then ask the plan.
#
# And what does the answer become for `llama-2-70b+mha`, with a KV head for each query head?

# %% [markdown]
# ### A solution

# %%
small = gf.plan("llama-2-70b", weights="int4", machine="h100")
by_hand = (0.9 * 80e9 - parameters / 2) / per_token
planned = small.context_that_fits(80e9)
print(f"by hand {by_hand:,.0f} tokens, planned {planned:,}")
assert abs(by_hand - planned) < 0.01 * planned

every_head = gf.plan("llama-2-70b+mha", weights="int4", machine="h100").context_that_fits(80e9)
print(f"with 64 KV heads: {every_head:,}")
assert every_head < planned / 8  # a cache eight times as large, and larger weights

# %% [markdown]
# ## The same as a command
#
# ```bash
# glassformer plan llama-2-70b --weights int4 --gpu h100
# glassformer plan llama-2-70b --gpu h100:8 --batch 8 --context 4k
# glassformer plan llama-2-70b --train --gpu h100:8 --nodes 16 --batch 1024 --micro-batch 2 --recompute full --tokens 1.38T
# ```
#
# `--explain` shows each figure with its formula, `--find` searches the layouts that fit, and `--finetune lora:16` plans
# an adapter, for which eight GPUs are plenty.
#
# ## Where to go from here
#
# - [Planning](../planning.md): machines, measured factors, and published runs against their plans.
# - [Memory of a training step](../planning-memory.md), measured against planned; [clusters](../clusters.md).
# - [Attention](../parts/attention.md), [a latent cache](../parts/mla.md), [a window](../parts/window.md): ways to a
#   smaller cache. [Claims](../claims.md): `gqa-cache`, `experts-active`.
# - Chinchilla: [2203.15556](https://arxiv.org/abs/2203.15556). Recomputation:
#   [2205.05198](https://arxiv.org/abs/2205.05198).
