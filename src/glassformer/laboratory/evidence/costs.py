"""Counts of parameters, FLOPs and bytes."""

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim, credit, undecidable
from glassformer.laboratory.evidence.figure import Outcome, exact
from glassformer.naming import SIZES, preset
from glassformer.parts.core.cost import Cost, Shape
from glassformer.planning import plan


def gpt2_parameters(bench: Bench) -> Outcome:
    claimed, rounded = 117e6, 0.5e6
    config = preset("gpt2")
    figures = (
        exact("parameters", config.num_params(), least=claimed - rounded, most=claimed + rounded, published=claimed),
        exact("parameters of the layers", config.num_params(embeddings=False)),
    )
    return Outcome(figures=figures, size="gpt2", sure="counted")


def qwen3_embedding(bench: Bench) -> Outcome:
    claimed, rounded = 622e6, 0.5e6
    config = preset("qwen3-8b")
    tables = config.num_params() - config.num_params(embeddings=False)
    figures = (
        exact("parameters of the embedding", config.vocab_size * config.d_model, least=claimed - rounded,
              most=claimed + rounded, published=claimed),
        exact("parameters of embedding and head", tables),
    )  # fmt: skip
    return Outcome(figures=figures, size="qwen3-8b", sure="counted")


def qwen3_ffn_share(bench: Bench) -> Outcome:
    claimed, rounded = 0.789, 0.0005
    cost = preset("qwen3-8b").costs(Shape())
    layer, network = cost["layers.0"].parameters, cost["layers.0.ffn"].parameters
    figure = exact("share of the FFN in a layer's parameters", network / layer, least=claimed - rounded,
                   most=claimed + rounded, published=claimed)  # fmt: skip
    return Outcome(figures=(figure,), size=f"qwen3-8b, {layer:,} parameters in a layer", sure="counted")


def qwen3_head_share(bench: Bench) -> Outcome:
    claimed, rounded = 0.01, 0.005
    config = preset("qwen3-8b")
    head = config.vocab_size * config.d_model + config.d_model
    figure = exact("share of the head and the final norm", head / config.num_params(), least=claimed - rounded,
                   most=claimed + rounded, published=claimed)  # fmt: skip
    return Outcome(figures=(figure,), size=f"qwen3-8b, {config.num_params():,} parameters", sure="counted")


def tied_parameters(bench: Bench) -> Outcome:
    tied, untied = preset("gpt2"), preset("gpt2+untied")
    saved = untied.num_params() - tied.num_params()
    table = tied.vocab_size * tied.d_model
    figures = (
        exact("parameters that a tied head saves", saved, least=table, most=table, published=table),
        exact("of an untied model", saved / untied.num_params(), "of all"),
    )
    return Outcome(figures=figures, size="gpt2", sure="counted")


def twelve_d_squared(bench: Bench) -> Outcome:
    models = ("gpt2@124m", "gpt2@1.5b", "gpt2@7b", "llama-7b")
    tolerance = 0.02
    shapes = {"llama-7b": SIZES["7b"]}
    figures = []
    for name in models:
        layers, width, _ = shapes.get(name) or SIZES[name.partition("@")[2]]
        found = preset(name).num_params(embeddings=False) / (layers * width**2)
        low, high = 12 * (1 - tolerance), 12 * (1 + tolerance)
        figures.append(exact(f"parameters of {name} over d^2 L", found, least=low, most=high, published=12))
    return Outcome(figures=tuple(figures), size=", ".join(models), sure=f"counted; within {tolerance:.0%}")


def six_n(bench: Bench) -> Outcome:
    name, tolerance = "gpt2@10m+kernel=naive", 0.02
    context = bench.scaled(256, 32)
    config = preset(f"{name}+vocab_size=4096+context={context}")
    tokens = torch.zeros(1, context, dtype=torch.int64)
    model = config.build(seed=0)
    with FlopCounterMode(display=False) as counted:
        model.loss(tokens, tokens).backward()
    weights = config.num_params(embeddings=False) + config.vocab_size * config.d_model
    width, layers = config.d_model, config.n_layers
    rule = 6 * weights + 12 * layers * width * context
    found = counted.get_total_flops() / context
    figures = (
        exact("counted FLOPs of a token over the rule", found / rule, least=1 - tolerance, most=1 + tolerance,
              published=1),
        exact("our own count over the counter's", 3 * config.flops(context) / found, least=1 - 1e-9, most=1 + 1e-9),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{name}, context {context}", sure=f"counted; within {tolerance:.0%}")


def attention_quadratic(bench: Bench) -> Outcome:
    short, long = 1 << 14, 1 << 20
    tolerance = 1e-3
    config = preset("gpt2@124m")

    def cost(n: int) -> Cost:
        return config.costs(Shape(s=n, t=n, phase="prefill"))

    def products(n: int) -> float:
        """Returns the FLOPs of QK^T and of patterns times values for n tokens: attention without its weight
        matrices."""
        mixer = cost(n)["layers.0.mixer"]
        return mixer.flops - 2 * n * 4 * config.d_model**2

    def network(n: int) -> float:
        return cost(n)["layers.0.ffn"].flops

    def exponent(of: Callable[[int], float]) -> float:
        return math.log(of(long) / of(short)) / math.log(long / short)

    figures = [
        exact(f"exponent of the FLOPs of {what} in n", exponent(of), least=wanted - tolerance, most=wanted + tolerance,
              published=wanted)
        for what, of, wanted in (("attention", products, 2), ("the FFN", network, 1))
    ]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"gpt2@124m, {short:,} to {long:,} tokens", sure="counted")


def gqa_cache(bench: Bench) -> Outcome:
    model = "llama@124m"  # 12 heads, as in the source.
    tokens = 2048
    whole = preset(f"{model}+mha").state_bytes(tokens)
    figures = [
        exact(f"cache of {groups} groups over that of 12 heads", preset(f"{model}{change}").state_bytes(tokens) / whole,
              least=groups / 12 - 1e-12, most=groups / 12 + 1e-12, published=published)
        for groups, change, published in ((1, "+mqa", 0.08), (4, "+gqa:4", 0.33))
    ]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"{model}, {tokens:,} tokens", sure="counted")


def latent_cache(bench: Bench) -> Outcome:
    tokens = 4096
    wanted = 61 * 576 * 2  # layers, elements per token, bytes
    found = preset("deepseek-v3").state_bytes(tokens) / tokens
    figure = exact("bytes of the cache for a token", found, "bytes", least=wanted, most=wanted, published=wanted)
    return Outcome(figures=(figure,), size=f"deepseek-v3, {tokens:,} tokens in 16 bits", sure="counted")


def llama_cache(bench: Bench) -> Outcome:
    tokens = 4096
    layers, width, bytes = 32, 4096, 2
    formula = 2 * layers * width * bytes
    found = preset("llama-7b").state_bytes(tokens) / tokens
    figure = exact("bytes of the cache for a token", found, "bytes", least=formula, most=formula, published=formula)
    return Outcome(figures=(figure,), size=f"llama-7b, {tokens:,} tokens in 16 bits", sure="counted")


def window_cache(bench: Bench) -> Outcome:
    window, tokens = 4096, 32768
    config = preset("mistral-7b")
    ratio = config.state_bytes(tokens) / preset("mistral-7b+causal").state_bytes(tokens)
    figure = exact(f"cache after {tokens:,} tokens over that without a window", ratio, least=window / tokens,
                   most=window / tokens * 1.01, published=window / tokens)  # fmt: skip
    return Outcome(figures=(figure,), size=f"mistral-7b, window {window:,}", sure="counted")


def training_memory(bench: Bench) -> Outcome:
    low, high = 12.0, 16.0
    steps = (("llama-3-8b", 1, 2048), ("gpt2", 16, 1024))  # model, sequences, tokens of a step
    inference = 2  # bytes of a weight
    figures = []
    for name, batch, tokens in steps[: bench.scaled(len(steps), 1)]:
        config = preset(name)
        took = plan(config, train=True, batch=batch, context=tokens).peak.total / (inference * config.num_params())
        figures.append(exact(f"training over weights in 16 bits, {name} at {batch} x {tokens:,}", took, "times",
                             least=low, most=high))  # fmt: skip
    return Outcome(figures=tuple(figures), size="one rank, AdamW with weights in fp32, nothing recomputed",
                   sure="planned: the peak of a step", notes=("It depends on the tokens of a step.",))  # fmt: skip


CLAIMS = [
    Claim(
        name="gpt2-parameters", kind="exact", minutes=0.01,
        statement="GPT-2 small has about 117M parameters.",
        source=credit("in-depth") + ", after the first version of the GPT-2 report",
        published="117M",
        size="any",
        measure=gpt2_parameters,
    ),
    Claim(
        name="gpt4-size", kind="undecidable", minutes=0,
        statement="GPT-4 has 1.76 trillion parameters in 16 experts.",
        source=credit("mathematics"), published="1.76T", size="the model",
        measure=undecidable("Neither the model nor its size is published: no measurement of ours bears on it."),
    ),
    Claim(
        name="qwen3-embedding", kind="exact", minutes=0.01,
        statement="The embedding of Qwen3-8B has 622M parameters.",
        source=credit("first-lesson"), published="622M", size="any",
        measure=qwen3_embedding,
    ),
    Claim(
        name="qwen3-ffn-share", kind="exact", minutes=0.01,
        statement="In Qwen3-8B the FFN holds 78.9 % of the parameters of a layer.",
        source=credit("first-lesson"), published="78.9 %", size="any",
        measure=qwen3_ffn_share,
    ),
    Claim(
        name="qwen3-head-share", kind="exact", minutes=0.01,
        statement="The head and the final norm of Qwen3-8B are about 1 % of its parameters.",
        source=credit("first-lesson"), published="1 %", size="any",
        measure=qwen3_head_share,
    ),
    Claim(
        name="tied-parameters", kind="exact", minutes=0.01,
        statement="Tying the head to the embedding saves one table of vocabulary times width.",
        source="1608.05859", published="v x d", size="any",
        measure=tied_parameters,
    ),
    Claim(
        name="twelve-d-squared", kind="exact", minutes=0.01,
        statement="The layers of a decoder have 12 d^2 L parameters.",
        source="2001.08361, section 2.1", published="12", size="any",
        measure=twelve_d_squared,
    ),
    Claim(
        name="six-n", kind="exact", minutes=0.1,
        statement="Training takes 6 N + 12 L d s FLOPs for each token.",
        source="2001.08361; 2204.02311", published="6 N T, and attention", size="any",
        measure=six_n,
    ),
    Claim(
        name="attention-quadratic", kind="exact", minutes=0.01,
        statement="Attention costs O(n^2 d) and the FFN O(n d^2).",
        source="1706.03762", published="exponents 2 and 1", size="any",
        measure=attention_quadratic,
    ),
    Claim(
        name="gqa-cache", kind="exact", minutes=0.01,
        statement="The cache of grouped-query attention is g/n of the whole: a third with 4 of 12 heads, 8 % with one.",
        source="2305.13245", published="33 % and 8 %", size="any",
        measure=gqa_cache,
    ),
    Claim(
        name="latent-cache", kind="exact", minutes=0.01,
        statement="DeepSeek-V3 keeps 70 kB of cache for a token.",
        source="2412.19437; 2505.09343", published="70.272 kB", size="any",
        measure=latent_cache,
    ),
    Claim(
        name="llama-7b-cache", kind="exact", minutes=0.01,
        statement="A cache takes 2 L d numbers for each token: half a MiB for a model of 7B with one KV head per "
        "query head.",
        source=credit("mathematics"), published="2 x 32 x 4,096 x 2 bytes", size="any",
        measure=llama_cache,
    ),
    Claim(
        name="window-cache", kind="exact", minutes=0.01,
        statement="A window of 4,096 tokens keeps an eighth of the cache at 32,768 tokens.",
        source="2310.06825, section 2", published="8 times less", size="any",
        measure=window_cache,
    ),
    Claim(
        name="training-memory", kind="exact", minutes=0.02,
        statement="Training takes 12 to 16 times the memory of inference.",
        source=credit("core"), published="12 to 16 times", size="any",
        measure=training_memory,
    ),
]  # fmt: skip
