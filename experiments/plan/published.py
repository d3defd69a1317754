"""Published figures of twenty-one sources, against plans of the same inputs.

The throughput of a published run gives its MFU from our FLOPs; its layout gives a planned time. Both are compared with
the published figure; the tests bound each error by `tolerance`. Points without tolerance compare figures that measure
different things, as their note explains. Every figure of ours comes from the library: a quotient of two published
numbers, as TFLOP/s over the peak or hours times a price, does not test it and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

import glassformer as gf
from experiments.plan import mpt
from glassformer.config import stack_of
from glassformer.parallel.layout import Layout
from glassformer.planning.machines import cluster, machines
from glassformer.planning.time import DAY, RunTime, StepTime, again, step_time, workload

GIB = 2**30
GPT = "gpt2+d_model={d}+layers={layers}+heads={heads}+vocab_size=51200+context=2048"
LLAMA_405B = "llama-2-70b+vocab_size=128256+context=8192+d_model=16384+layers=126+heads=128+gqa:8+ffn.hidden=53248"
LLAMA_70B = "llama-2-70b+vocab_size=128256+context=8192"
LLAMA_65B = "llama-7b+d_model=8192+layers=80+heads=64+ffn.hidden=22016"
PALM = (
    "llama-7b+d_model=18432+layers=118+heads=48+head_dim=256+mqa+ffn.hidden=73728+vocab_size=256000+tied+parallel"
    "+context=2048"
)
BLOOM = "bloom-560m+d_model=14336+layers=70+heads=112+vocab_size=250880+context=2048"
PYTHIA = {
    "70m": (512, 6, 8, 50304, 510, 32, 1, "+kernel=naive"), "410m": (1024, 24, 16, 50304, 2540, 32, 1, ""),
    "1.4b": (2048, 24, 16, 50304, 7120, 64, 1, ""), "2.8b": (2560, 32, 32, 50304, 14240, 64, 1, ""),
    "6.9b": (4096, 32, 32, 50432, 33500, 128, 2, ""), "12b": (5120, 36, 40, 50688, 72300, 256, 4, ""),
}  # fmt: skip
"""Width, layers, heads, vocabulary, GPU hours; by EleutherAI/pythia models/*.yml GPUs, tensor parallelism, kernel."""
OLMO_7B = "olmo-2-7b+context=8192"
OLMO_32B = f"{OLMO_7B}+d_model=5120+layers=64+heads=40+gqa:8+head_dim=128+ffn.hidden=27648"
LLAMA_2 = (
    "not determined: neither how many GPUs nor which layout, nor what failures took, is published; planned as FSDP on "
    "1,024 without recomputation, which is the least"
)
OF_BLOOM = (
    "150 TFLOP/s count what is computed again, a quarter; not determined: hours have failures and evaluations in them, "
    "throughput has not"
)
OF_PYTHIA = "not determined: hours have evaluations and checkpoints in them, the code is of 2022, in fp16"
UNFUSED = "; nor is how much of its attention is fused: with all of it 265 hours are planned"
TITAN = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
TRAINY = "torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
TITAN_A100 = "torchtitan docs/performance.md at 0413364"


@dataclass(frozen=True)
class Point:
    """A published figure and ours, both in `unit`."""

    number: int
    what: str
    published: float
    ours: float
    unit: str
    tolerance: float | None
    source: str
    note: str = ""
    low: float | None = None
    high: float | None = None
    """Ends of the planned range; None without a range."""
    divided: float | None = None
    """Published / planned seconds of a step; None unless the layout divides tensors, layers or sequences."""

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


@cache
def config(name: str) -> gf.ModelConfig:
    return gf.preset(name)


def windowed(name: str) -> gf.ModelConfig:
    """Returns the config with a window of 4,096 tokens in three layers of four, as in Olmo 3."""
    far = config(name)
    near = next(config(f"{name}+window:4096").layers())
    return far.replace(stack=stack_of([block if i % 4 == 3 else near for i, block in enumerate(far.layers())]))


def flops(name: str, context: int) -> float:
    """Returns the training FLOPs of a token, with every query against all keys."""
    return 3 * config(name).flops(context)


def mfu(name: str, context: int, rate: float, gpu: str) -> float:
    """Returns the MFU, in per cent, of `rate` tokens/s on one accelerator."""
    return 100 * flops(name, context) * rate / machines()[gpu].peak_of("bfloat16")


def planned(name: str, context: int, gpu: str, nodes: int, layout: str, batch: int) -> StepTime:
    work = workload(config(name), context, torch.bfloat16)
    return step_time(work, batch, Layout.of(layout), cluster(f"{gpu}:8", nodes))


def rate(
    number: int, what: str, published: float, step: StepTime, tolerance: float | None, source: str, note: str = ""
) -> Point:
    """Returns the published and planned tokens/s of one accelerator."""
    layout, ranks = step.layout, step.layout.ranks
    return Point(
        number, what, published, step.tokens_per_second / ranks, "tokens/s/GPU", tolerance, source, note,
        step.tokens / step.high / ranks, step.tokens / step.low / ranks,
        step.tokens_per_second / ranks / published if layout.tp * layout.pp * layout.cp * layout.ep > 1 else None,
    )  # fmt: skip


def days(
    number: int, what: str, published: float, run: RunTime, tolerance: float | None, source: str, note: str = ""
) -> Point:
    ours, low, high = run.seconds / DAY, run.low / DAY, run.high / DAY
    return Point(number, what, published, ours, "days", tolerance, source, note, low, high)


def _titan() -> Iterator[Point]:
    capped = "not determined: parts held to 500 W, whose peak is not published; that of 700 W is planned"
    for number, nodes, eager in ((1, 1, 5762), (2, 16, 5605)):
        layout = f"dp={8 * nodes},zero=3,micro=2,recompute=alternate"
        step = planned("llama-3-8b", 8192, "h100-96gb", nodes, layout, 16 * nodes)
        yield rate(number, f"Llama 3.1 8B, {8 * nodes} H100, eager", eager, step, None, TITAN, capped)
    for cp, published in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        s = 32768 * cp
        layout = f"dp={8 // cp},cp={cp},zero=3,micro=1,recompute=full"
        step = planned(f"llama-3-8b+context={s}", s, "h100-96gb", 1, layout, 8 // cp)
        yield rate(3, f"Llama 3.1 8B, context {s:,}, cp={cp}", published, step, 0.35, TITAN, "they ran float8")
    step = planned(LLAMA_70B, 8192, "h100-96gb", 32, "dp=32,tp=8,sp=1,zero=3,micro=16,recompute=full", 512)
    yield rate(4, "Llama 3.1 70B, FSDP 32, TP 8", 829, step, 0.35, TITAN, "they ran float8")
    for interleave, published in ((1, 100), (2, 128)):
        layout = f"dp=8,tp=8,pp=8,sp=1,zero=3,micro=4,interleave={interleave},recompute=full"
        step = planned(LLAMA_405B, 8192, "h100-96gb", 64, layout, 256)
        what = f"Llama 3.1 405B, FSDP 8, TP 8, PP 8, {'interleaved' if interleave > 1 else '1F1B'}"
        yield rate(5, what, published, step, None, TITAN, "float8; the order of the schedules is what is tested")
    for nodes, published in ((4, 10938), (8, 10753)):
        layout = f"dp={8 * nodes},zero=3,micro=2,recompute=alternate"
        step = planned("llama-3-8b", 8192, "h200", nodes, layout, 16 * nodes)
        yield rate(
            6, f"Llama 3.1 8B, {8 * nodes} H200", published, step, None, TRAINY, "float8 products: bf16 is planned"
        )


def _runs() -> Iterator[Point]:
    worst = max(mpt.rows(), key=lambda row: abs(row.mfu_of_throughput / row.mfu - 1))
    what = f"216 runs of MPT, MFU: the furthest, {worst.model} at context {worst.context:,}"
    yield Point(7, what, worst.mfu, worst.mfu_of_throughput, "% MFU", 0.015, mpt.SOURCE)


def _llama_3() -> Iterator[Point]:
    source = "Llama Team 2024, 2407.21783, table 4"
    for what, nodes, dp, cp, context, batch, tflops, tolerance, note in (
        ("8,192 GPUs", 1024, 64, 1, 8192, 2048, 430, 0.25, ""),
        ("16,384 GPUs", 2048, 128, 1, 8192, 2048, 400, None, "a longer bubble than theirs"),
        ("context 131,072", 2048, 8, 16, 131072, 128, 380, None, "outside of the range: pieces of a sequence between "
         "nodes are planned without overlap"),
    ):  # fmt: skip
        name = LLAMA_405B.replace("context=8192", f"context={context}")
        layout = f"dp={dp},tp=8,pp=16,cp={cp},sp=1,zero=1,micro=1"
        step = planned(name, context, "h100", nodes, layout, batch)
        each = tflops * 1e12 / flops(name, context)
        yield rate(8, f"Llama 3 405B, {what}: {tflops} TFLOP/s", each, step, tolerance, source, note)
    hours = flops(LLAMA_405B, 8192) * 15.6e12 / 400e12 / 3600
    note = "at 400 TFLOP/s; the rest is what failures took, 7 %"
    yield Point(9, "Llama 3 405B, 15.6T tokens", 30.84e6, hours, "GPU hours", 0.1, "Llama 3.1 model card", note)


def _deepseek() -> Iterator[Point]:
    source = "DeepSeek-AI 2024, 2412.19437, table 1"
    work = workload(config("deepseek-v3"), 4096, torch.bfloat16)
    step = planned("deepseek-v3", 4096, "h800", 256, "dp=128,pp=16,ep=64,zero=1,micro=1", 15360)
    note = "at the range's end: float8 products, and exchanges while others compute"
    hours = "14.8T tokens in 2.664M hours"
    yield rate(10, f"DeepSeek-V3, {hours}", 14.8e12 / 2.664e6 / 3600, step, None, source, note)
    seen = (work.products + work.scores) / 1e9
    yield Point(10, "DeepSeek-V3, FLOPs of a token, causal, 4k", 250, seen, "GFLOP", 0.05, "often quoted")


def _states() -> Iterator[Point]:
    caches = {
        "deepseek-v3": 70_272, "llama-2-70b+kernel=auto": 327_680, LLAMA_405B: 516_096,
    }  # fmt: skip
    titles = ("DeepSeek-V3, latent", "80 layers, 8 heads of 128 (Qwen2.5 72B, Llama 2 70B)", "Llama 3 405B")
    for title, (name, published) in zip(titles, caches.items(), strict=True):
        ours = config(name).state_bytes(1024, torch.bfloat16) / 1024
        yield Point(11, f"{title}: cache of a token, bf16", published, ours, "B", 0.0, "DeepSeek-AI 2025, 2505.09343")
    small = "qwen3-0.6b+layers=28+d_model=2048"
    each = config(small).state_bytes(1024, torch.bfloat16) / 1024
    tokens = round(18.78 * GIB / each)
    yield Point(12, "Qwen3 1.7B, tokens in 18.78 GiB", 175_856, tokens, "tokens", 5e-4, "vLLM issue 33263")
    whole = config("gpt-oss-120b").state_bytes(128, torch.bfloat16) / 128  # within the window every layer keeps all
    note = "an engine that keeps full pages for windowed layers; ours keeps a window for each second layer"
    yield Point(12, "gpt-oss-120b, tokens in 5.38 GiB", 78_384, round(5.38 * GIB / whole), "tokens", 5e-4,
                "vLLM log", note)  # fmt: skip


def _utilisation() -> Iterator[Point]:
    source = "Chowdhery et al. 2022, 2204.02311, table 3"
    share = 100 * 238.3e3 * flops(PALM, 2048) / (6144 * 275e12)
    yield Point(13, "PaLM 540B, 6,144 TPU v4, 238.3k tokens/s", 46.2, share, "% MFU", 0.01, source)
    source = "Jiang et al. 2024, 2402.15627, table 2"
    name = GPT.format(d=12288, layers=96, heads=96)
    for what, seconds, published in (("MegaScale", 6.34, 55.2), ("Megatron-LM", 8.57, 41.2)):
        each = 6144 * 2048 / seconds / 12288
        share = mfu(name, 2048, each, "a100-80gb")
        yield Point(14, f"{what} 175B, 12,288 A100, {seconds} s a step", published, share, "% MFU", 0.02, source)
    layout = "dp=192,tp=8,pp=8,sp=1,micro=1,interleave=6,zero=1,recompute=selective"
    step = planned(name, 2048, "a100-80gb", 1536, layout, 6144)
    yield rate(14, "MegaScale 175B, TP 8, PP 8, DP 192", 6144 * 2048 / 6.34 / 12288, step, 0.25, source)
    yield days(14, "MegaScale 175B, 300B tokens", 1.75, step.run(300e9), 0.1, source)


def _megatron() -> Iterator[Point]:
    source = "Korthikanti et al. 2022, 2205.05198, table 5"
    shapes = (
        (22, 6144, 48, 64, 8, 4, 1.10, 41.5, 1), (175, 12288, 96, 96, 64, 64, 13.75, 51.4, 3),
        (530, 20480, 105, 128, 280, 280, 37.83, 56.0, 3), (1000, 25600, 128, 160, 512, 512, 71.49, 56.3, 1),
    )  # fmt: skip
    for size, d, layers, heads, gpus, batch, seconds, published, interleave in shapes:
        name = GPT.format(d=d, layers=layers, heads=heads)
        each = batch * 2048 / seconds / gpus
        what = f"GPT {size}B, {gpus} A100, a step in {seconds} s"
        yield Point(15, what, published, mfu(name, 2048, each, "a100-80gb"), "% MFU", 0.01, source)
        layout = f"tp=8,pp={gpus // 8},sp=1,micro=1,interleave={interleave},recompute=selective"
        step = planned(f"{name}+kernel=naive", 2048, "a100-80gb", gpus // 8, layout, batch)
        yield rate(15, f"GPT {size}B, TP 8, PP {gpus // 8}, no fused attention", each, step, 0.25, source)


def _hours() -> Iterator[Point]:
    source = "Touvron et al. 2023, 2302.13971, section 2.4"
    step = planned(LLAMA_65B, 2048, "a100-80gb", 256, "dp=2048,zero=3,micro=1,recompute=selective", 2048)
    unknown = "their layout is not published: planned as FSDP"
    yield rate(16, "LLaMA 65B, 2,048 A100", 380, step, 0.15, source, unknown)
    yield days(16, "LLaMA 65B, 2,048 A100, 1.4T tokens", 21, step.run(1.4e12), 0.15, source, unknown)
    source = "Touvron et al. 2023, 2307.09288, table 2"
    for size, name, hours in (("7B", "llama-7b+context=4096", 184_320), ("13B", "llama-13b+context=4096", 368_640),
                              ("70B", "llama-2-70b", 1_720_320)):  # fmt: skip
        usual = flops(name, 4096) * 2e12 / (0.45 * machines()["a100-80gb"].peak_of("bfloat16")) / 3600
        yield Point(17, f"Llama 2 {size}, 2T tokens at 45 % of the peak", hours, usual, "GPU hours", 0.07, source)
        step = planned(name, 4096, "a100-80gb", 128, "dp=1024,zero=3,micro=1", 1024)
        run = step.run(2e12)
        yield Point(17, f"Llama 2 {size}, 2T tokens", hours, run.hours, "GPU hours", None, source, LLAMA_2,
                    run.low / 3600 * 1024, run.high / 3600 * 1024)  # fmt: skip
    source = "Le Scao et al. 2022, 2211.05100"
    work = workload(config(BLOOM), 2048, torch.bfloat16)
    repeated = 1 + again(work, Layout(recompute="full")) / 3
    of_bloom = flops(BLOOM, 2048) * repeated * 366e9 / 150e12 / 3600
    yield Point(18, "BLOOM 176B, 366B tokens at 150 TFLOP/s", 1_082_990, of_bloom, "GPU hours", None, source, OF_BLOOM)
    source = "Biderman et al. 2023, 2304.01373, table 5"
    for size, (d, layers, heads, vocab, hours, gpus, tp, kernel) in PYTHIA.items():
        name = f"pythia-160m+d_model={d}+layers={layers}+heads={heads}+vocab_size={vocab}"
        dp = gpus // tp
        layout = f"dp={dp},tp={tp},zero=1,micro={min(32, 1024 // dp // (2 if tp > 1 else 1))},recompute=full"
        run = planned(name + kernel, 2048, "a100-40gb", gpus // 8, layout, 1024).run(299.9e9)
        note = f"{mfu(name, 2048, 299.9e9 / hours / 3600, 'a100-40gb'):.0f} % MFU: small models are far from 45 %; "
        yield Point(19, f"Pythia {size}, 300B tokens", hours, run.hours, "GPU hours", None, source,
                    note + OF_PYTHIA + (UNFUSED if kernel else ""), run.low / 3600 * gpus, run.high / 3600 * gpus,
                    hours / run.hours if tp > 1 else None)  # fmt: skip
    source = "OLMo-core 1.2.0, README"
    thirteen = "olmo-2-7b+d_model=5120+layers=40+heads=40+ffn.hidden=13824"
    one = "olmo-2-1b+layers=18+ffn.hidden=5632"
    sizes = (("1B", one, 46_000, 40.0), ("7B", "olmo-2-7b", 9_850, 47.5), ("13B", thirteen, 4_500, 41.5))
    for what, name, each, published in sizes:
        yield Point(
            20, f"OLMo 2 {what} at {each:,} tokens/s", published, mfu(name, 4096, each, "h100"), "% MFU", 0.03, source
        )
    source = "OLMo-core src/scripts/official/OLMo3 (GPUs, batch, layout); muxup.com/2025q4/minipost-olmo3-training-cost"
    for what, base, gpus, layout, tokens, speed, taken in (
        ("7B", OLMO_7B, 512, "dp=512,zero=3,micro=1", 5.93e12, 7700, 234e3),
        ("32B", OLMO_32B, 1024, "dp=1024,zero=3,micro=1,recompute=alternate", 5.5e12, 1900, 1.05e6),
    ):  # fmt: skip
        run = step_time(workload(windowed(base), 8192, torch.bfloat16), gpus, Layout.of(layout),
                        cluster("h100:8", gpus // 8)).run(tokens)  # fmt: skip
        halves = "; half of the activations computed again" if "recompute" in layout else ""
        yield rate(21, f"Olmo 3 {what}", speed, run.step, 0.15, source, f"planned as FSDP{halves}")
        yield Point(21, f"Olmo 3 {what}, {tokens / 1e12:g}T tokens", taken, run.hours, "GPU hours", None, source,
                    f"restarts and checkpoints included: {taken * 3600 * speed / tokens - 1:.0%} more than their "
                    "tokens at their rate", run.low / 3600 * gpus, run.high / 3600 * gpus)  # fmt: skip


GROUPS: tuple[Callable[[], Iterator[Point]], ...] = (
    _titan, _runs, _llama_3, _deepseek, _states, _utilisation, _megatron, _hours,
)  # fmt: skip


@cache
def points() -> tuple[Point, ...]:
    return tuple(point for group in GROUPS for point in group())


def beyond(without: str = "") -> tuple[float, float]:
    """Returns the 10th and 90th percentile of published over planned time, of steps of divided layouts in all sources
    but `without`: `planning.time.BEYOND`."""
    ratios = [one.divided for one in points() if one.divided is not None and one.source != without]
    low, high = np.quantile(ratios, (0.1, 0.9))
    return float(low), float(high)


if __name__ == "__main__":
    for one in points():
        between = "" if one.low is None else f" ({one.low:.4g} to {one.high:.4g})"
        print(f"{one.number:2} {one.what}: {one.published:.6g} / {one.ours:.6g}{between} {one.unit} {one.error:+.1%}")
    print("divided layouts take, over what is planned:", beyond())
