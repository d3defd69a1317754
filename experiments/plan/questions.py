"""Questions that introductions to the transformer ask, each one command: our figure with its formula, and the figure
that is often quoted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import glassformer as gf
from glassformer.planning import Plan


@dataclass(frozen=True)
class Answer:
    """A question, the command, and both figures."""

    question: str
    command: str
    ours: str
    formula: str
    quoted: str
    verdict: str


MATRIX = 0.01
"""Least share of a layer that a matrix has, and no norm."""


@cache
def of(name: str, **asked: Any) -> Plan:
    return gf.plan(gf.preset(name), **asked)


def component(name: str, row: str) -> Any:
    return next(one for one in of(name).components if one.name == row)


def answers() -> Iterator[Answer]:
    """Yields the answers in the order of the page."""
    ffn = component("qwen3-8b", "ffn")
    yield Answer(
        "How many parameters has the feed-forward network of Qwen3-8B?", "glassformer plan qwen3-8b --explain",
        f"{ffn.parameters:,}, {ffn.share:.1%} of the model", f"{ffn.symbols} = {ffn.numbers}",
        "hidden size 14,336; 78.9 % of a layer", "wrong: its hidden size is 12,288",
    )  # fmt: skip
    (layer,) = of("qwen3-8b").layers
    matrices = [row for row in layer.rows if row.share > MATRIX]
    gate, q = (next(row for row in matrices if row.name == name) for name in ("ffn.gate", "mixer.q"))
    yield Answer(
        "What shares of a layer of Qwen3-8B have Q, K, V, O, gate, up, down?", "glassformer plan qwen3-8b --explain",
        f"{', '.join(f'{100 * row.share:.1f}' for row in matrices)}% of {layer.parameters:,}",
        "d^2, c d, c d, d^2, f d, f d, d f with c = 1,024, f = 12,288", "Q 7.5%, MLP 78.9%",
        f"wrong: the MLP has {3 * gate.share:.1%}; the 16.7M FLOPs of Q are multiply-adds, {q.flops / 1e6:.1f}M FLOPs",
    )  # fmt: skip
    head = component("qwen3-8b", "head")
    yield Answer(
        "And its head?", "glassformer plan qwen3-8b --explain", f"{head.parameters:,}, {head.share:.1%}",
        f"{head.symbols} = {head.numbers}", "with the last norm about 1 %", "wrong: the head is not tied",
    )  # fmt: skip
    table = component("qwen3-8b", "embedding")
    yield Answer("And its embedding?", "glassformer plan qwen3-8b --explain", f"{table.parameters:,}",
                 f"{table.symbols} = {table.numbers}", "622M", "right")  # fmt: skip
    yield Answer("How large is GPT-2 small?", "glassformer plan gpt2", f"{of('gpt2').parameters:,}",
                 "the components of `--explain` add up to it", "117M", "wrong: 124M with tied ends")  # fmt: skip
    for name in ("gpt2", "llama-3-8b"):
        one = of(name)
        ends = sum(part.parameters for part in one.components if part.name in ("embedding", "positions", "head"))
        rule = 12 * one.config.n_layers * one.config.d_model**2
        yield Answer(
            f"Is 12 L d^2 the size of the layers of {name}?", f"glassformer plan {name} --explain",
            f"{one.parameters - ends:,}", "mixer + ffn + norms",
            f"12 * {one.config.n_layers} * {one.config.d_model}^2 = {rule:,}",
            f"{rule / (one.parameters - ends) - 1:+.1%}"
            + (": fewer KV heads, a gated FFN" if name != "gpt2" else ": biases and norms are missing"),
        )  # fmt: skip
    block = "gpt2+layers=1+heads=8+context=512"
    flops = of(block).forward_of_layers
    yield Answer(
        "How many FLOPs has one block with n = 512, d = 768, 8 heads, 4 d?", f"glassformer plan {block} --explain",
        f"{flops:,}", "24 n d^2 + 4 n^2 d = 24 * 512 * 768^2 + 4 * 512^2 * 768",
        "O(n d^2) and O(n^2 d)", f"right; the square is {4 * 512**2 * 768 / flops:.0%} of it here",
    )  # fmt: skip
    spent = of("llama-7b").training_flops
    yield Answer(
        "What does training LLaMA 7B on a token cost?", "glassformer plan llama-7b --explain",
        f"{spent.training:.4g} FLOPs", "3 x forward = 6 N - lookups + scores",
        f"6 N = {spent.six_n:.4g}", f"{spent.six_n / spent.training - 1:+.0%}: scores of 2,048 tokens are missing",
    )  # fmt: skip
    for name, context, batch in (("llama-3-8b", 2048, 1), ("gpt2", 1024, 16)):
        planned: Any = gf.plan(gf.preset(name), train=True, context=context, batch=batch)
        ratio = planned.memory["total"] / (2 * of(name).parameters)
        yield Answer(
            f"How much more memory than its bf16 weights does training {name} take, {batch} x {context:,} tokens?",
            f"glassformer plan {name} --train --batch {batch} --context {context}",
            f"{ratio:.1f} times", "weights + gradients + optimizer = 16 N bytes, and activations by token",
            "12 to 16 times", "depends on the batch: states without activations are 8 times",
        )  # fmt: skip
    for name in ("llama-7b", "llama-3-8b"):
        one = of(name)
        rule = 2 * one.config.n_layers * one.config.d_model * 2
        yield Answer(
            f"What does a token take in the cache of {name}, bf16?", f"glassformer plan {name}",
            f"{one.state_bytes_per_token:,.0f} B", "2 L c bytes, c the width of all KV heads",
            f"2 L H d bytes = {rule:,}",
            "right" if rule == one.state_bytes_per_token else "4 times too large: 8 of 32 heads",
        )  # fmt: skip
    full = of("gpt2").state_bytes
    for word, quoted in (("mqa", "8 %"), ("gqa:4", "33 %")):
        share = of(f"gpt2+{word}").state_bytes / full
        yield Answer(f"What is left of GPT-2's cache with {word}?", f"glassformer plan gpt2 gpt2+{word}",
                     f"{share:.1%}", "KV heads / heads", quoted, "right")  # fmt: skip
    norms = [component(name, "norms").parameters for name in ("gpt2", "gpt2+rmsnorm")]
    yield Answer(
        "How many parameters does RMSNorm save?", "glassformer plan gpt2 gpt2+rmsnorm --explain",
        f"{norms[0] - norms[1]:,} of {norms[0]:,}", "2 d for LayerNorm, d for RMSNorm", "half",
        f"right, of {norms[0] / of('gpt2').parameters:.2%} of the model",
    )  # fmt: skip
    run: Any = gf.plan(gf.preset("llama-7b"), train=True, machine="h100:8", batch=64, tokens="140B",
                       layout="dp=8,zero=3,micro=4,recompute=full")  # fmt: skip
    yield Answer(
        "How long does LLaMA 7B train on 20 tokens a parameter, on eight H100?",
        "glassformer plan llama-7b --train --gpu h100:8 --batch 64 --tokens 140B "
        "--layout dp=8,zero=3,micro=4,recompute=full",
        f"{run.run.low / 86400:.0f} to {run.run.high / 86400:.0f} days", "roofline by kind of work x measured factors",
        f"6 N D / (8 x peak) = {6 * 6.738e9 * 140e9 / 8 / 989.5e12 / 86400:.0f} days",
        f"a third of the peak is reached: MFU {run.time.mfu:.0%}",
    )  # fmt: skip
    yield Answer("And GPT-4?", "", "", "", "1.76T parameters in 16 experts", "not published: no figure is given here")
