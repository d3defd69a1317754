# %% [markdown]
# # Your own part
#
# You have an idea: *what if the norm were simply …* Ideas of this kind are cheap, and most of them are wrong, so what
# counts is how fast one is tried: written in a few lines, counted, trained against a baseline, opened like everything
# else. A part of a transformer here is a class for the module and a class for its config, in any file you like.
#
# The idea we try is a published one. In 2025 Zhu and others asked whether transformers need norms at all, and replaced
# every norm by a curve, **Dynamic Tanh**, with one learned slope $\alpha$:
#
# $$\operatorname{DyT}(x) = \tanh(\alpha x) \odot w + b$$
#
# Like a norm it keeps large values within bounds. Unlike a norm it computes no mean over a token's vector, so that no
# entry has to wait for the others.
#
# *You need PyTorch modules and [a block from parts](02-a-block-from-parts.md). Ten minutes to read, one to run.*

# %% [markdown]
# ## The module
#
# An ordinary `nn.Module` with one addition: `init_weights` fills the parameters. The model calls it, so that one seed
# draws all weights in the same order. `wide` computes in float32 even where the model runs in bfloat16.

# %%
import torch
from torch import nn

import glassformer as gf
from glassformer.parts.own import Cost, Norm, NormConfig, norm_cost, wide


class DyT(Norm):
    def __init__(self, width):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def init_weights(self, init):
        self.alpha.data.fill_(0.5)
        self.weight.data.fill_(1.0)
        self.bias.data.zero_()

    def forward(self, x):
        y = torch.tanh(wide(self.alpha) * wide(x)) * wide(self.weight) + wide(self.bias)
        return y.to(x.dtype)


# %% [markdown]
# ## The config
#
# The config says what the part is called, builds it, and counts it. `kind` is its name in files, `words` its name in
# expressions. Let us make a mistake on purpose: we forget to count $\alpha$.


# %%
class DyTConfig(NormConfig, kind="dyt", words="dyt"):
    def build(self, ctx):
        return DyT(ctx.width or ctx.d_model)

    def costs(self, ctx, shape):
        return norm_cost(ctx, shape, weights=2, statistics=0)


MODEL = "llama@0.1m"
try:
    gf.preset(f"{MODEL}+dyt").build(seed=0)
except gf.RequestError as refused:
    print(refused)

# %% [markdown]
# It is refused, with the number that is missing. This matters more than it seems: comparisons are matched by these
# counts, and a comparison with a wrong count would be unfair and seem fair.

# %%


class CountedDyTConfig(NormConfig, kind="counted_dyt", words="dynamictanh"):
    def build(self, ctx):
        return DyT(ctx.width or ctx.d_model)

    def costs(self, ctx, shape):
        return norm_cost(ctx, shape, weights=2, statistics=0) + Cost.weights(1)


config = gf.preset(f"{MODEL}+dynamictanh")
model = config.build(seed=0)
print(f"{config.num_params():,} parameters counted, {sum(p.numel() for p in model.parameters()):,} built")
print(sorted({path for path in config.diff(gf.preset(MODEL)) if path.endswith("kind")}))
assert config.num_params() == sum(p.numel() for p in model.parameters())

# %% [markdown]
# Nothing else of the model changed. And everything else of the program works with it: `gf.train`, `gf.compare`,
# `gf.plan`, generation with a cache, `gf.capture`.
#
# ## Does it work?
#
# Train it against RMSNorm, with three seeds. A seed draws the first weights and the order of the text, and both arms
# share it, so that the difference within a seed is what counts. A text of English comes with every Python: the pages
# of its `help()`.

# %%
from pathlib import Path
from pydoc_data.topics import topics

Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")


def train(expression, seed):
    how = {"steps": 60, "batch_size": 8, "context": 32, "tokenizer": "byte", "evaluation_tokens": 4096}
    return gf.train(expression, "help.txt", seed=seed, progress=False, **how)


differences = []
for seed in range(3):
    base, run = train(MODEL, seed), train(f"{MODEL}+dynamictanh", seed)
    differences.append(run.validation["loss"] - base.validation["loss"])
    print(f"seed {seed}: RMSNorm {base.validation['loss']:.3f}, DyT {run.validation['loss']:.3f} nats per byte")
difference = torch.tensor(differences)
margin = 4.303 * difference.std() / 3**0.5  # Student's t for three seeds, 95 %
print(f"DyT minus RMSNorm: {difference.mean():+.3f} ± {margin:.3f}")
assert difference.mean() > margin

# %% [markdown]
# Read the interval and not the mean: there is a difference to speak of only if the interval excludes zero. It does, and
# our idea **loses**: the norm learns faster in all three seeds. The paper finds no loss in large models that train for
# long, so this is a result at one size, one short budget and one borrowed learning rate, and no more. With the class in a file, `gf.compare` does all
# of this for you, with processes, verdicts and a report (the command is below).
#
# ## Why does it lose?
#
# A loss is only a verdict. The reason is inside, and since our part is a part like any other, we can open the model. A
# norm gives what follows it values of size one, whatever comes in. What does our curve give?

# %% alt="Bars of the size of what leaves each of five norms after training: RMSNorm near one everywhere, Dynamic Tanh far below in the first layers and growing with depth"
import matplotlib.pyplot as plt

places = {  # norm -> the site that it reads
    "layers.0.residual.mixer_norm": "layers.0.resid_pre",
    "layers.0.residual.ffn_norm": "layers.0.resid_mid",
    "layers.1.residual.mixer_norm": "layers.1.resid_pre",
    "layers.1.residual.ffn_norm": "layers.1.resid_mid",
    "final_norm": "layers.1.resid_post",
}
tokens = torch.tensor(run.tokenizer.encode("A function is defined by the def statement."))[None]
sizes = {}
for name, model in {"RMSNorm": base.model, "DyT": run.model}.items():
    seen = gf.capture(model, tokens, list(places.values()))
    with torch.no_grad():
        left = [model.get_submodule(norm)(seen[site]) for norm, site in places.items()]
    sizes[name] = [one.square().mean().sqrt().item() for one in left]
    print(name, [round(size, 2) for size in sizes[name]])
assert sizes["DyT"][0] < 0.5 * sizes["RMSNorm"][0]

figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
for shift, (name, values) in zip((-0.2, 0.2), sizes.items(), strict=True):
    axis.bar(torch.arange(5) + shift, values, width=0.4, label=name)
axis.set(ylabel="root mean square of what leaves", xticks=range(5), ylim=(0, 1.5))
axis.set_xticklabels(["layer 0\nattention", "layer 0\nFFN", "layer 1\nattention", "layer 1\nFFN", "final"])
axis.legend(frameon=False, loc="upper left")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# There it is. A small value enters the tanh and a smaller one leaves, because for small values a tanh is a straight
# line. The embeddings start small, so the first layer works on whispers, where RMSNorm would have turned the volume up.
# That is a hypothesis one can test: larger initial embeddings, or a larger initial $\alpha$, are one line each.

# %% [markdown]
# ## Exercise: does it have to be tanh?
#
# A tanh is a straight line in the middle that flattens at both ends. **Write `HardDyT`,** which is exactly straight
# and then exactly flat: $\operatorname{clip}(\alpha x, -1, 1) \odot w + b$, with a config named `hardtanh`. It needs
# only one method that differs from `DyT`, and a config. Check it on a few numbers, and let a model with it take a
# gradient: do all its parameters get one?

# %% [markdown]
# ### A solution


# %%
class HardDyT(DyT):
    def forward(self, x):
        y = torch.clamp(wide(self.alpha) * wide(x), -1, 1) * wide(self.weight) + wide(self.bias)
        return y.to(x.dtype)


class HardDyTConfig(CountedDyTConfig, kind="hard_dyt", words="hardtanh"):
    def build(self, ctx):
        return HardDyT(ctx.width or ctx.d_model)


hard = gf.preset(f"{MODEL}+hardtanh").build(seed=0)
part = hard.final_norm
assert torch.allclose(part(torch.full((1, 4), 100.0).repeat(1, part.weight.numel() // 4)), torch.tensor(1.0))
tokens = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(0))
hard.loss(tokens[:, :-1], tokens[:, 1:]).backward()
assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in hard.parameters())

# %% [markdown]
# ## The same as a command
#
# Save the two classes as `dyt.py`, and every verb knows them with `--import dyt.py`. A file that comes with the
# examples, a feed-forward network with another activation, shows it:
#
# <!-- not run: takes minutes or hours -->
# ```bash
# glassformer compare llama@1m llama@1m+snake --data python-docs --minutes 1 --import examples/parts/snake.py --out snake
# ```
#
# ## Where to go from here
#
# - [Your own parts](../own-parts.md): an attention, a network, a mixer, an optimizer and an objective, each in one file.
# - [An honest comparison](../honest-comparison.md), and [learning rates](../tuning.md): a new part deserves its own.
# - [Claims](../claims.md) about norms: `rmsnorm-loses-nothing`, `rmsnorm-parameters`, `rmsnorm-is-faster`.
# - Dynamic Tanh: [2503.10622](https://arxiv.org/abs/2503.10622).
