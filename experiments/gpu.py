"""Training, decoding and attention on this GPU, with `transformers` and torch in the same run.

>>> python -m experiments.gpu --out docs/benchmarks/gpu.md       # ten minutes; --only train: less

Steps are in bf16 by autocast, with fused AdamW and gradients clipped at 1, in turn, and figures are medians. MFU is
6 N + 12 L d t FLOPs a token, every query against all keys, over the card's peak in bf16 (`planning/machines.yaml`).
Decoding has random weights, the same on both sides, in bf16: 128 tokens after a prompt of 128. `compiled` is
`compiled_regions` of ours in training, a CUDA graph of ours in decoding, and `torch.compile` of `transformers` and
nanoGPT; of ours, `whole model compiled` is `torch.compile` too.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glassformer as gf
from benchmarks.nanogpt import GPT
from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.generation import CompiledStep, stream
from glassformer.model import Model
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AttentionCall, Auto, Banded, Direct, Flex, Kernel, Naive, Sdpa, softcap
from glassformer.parts.position import Alibi
from glassformer.parts.region import compiled_regions
from glassformer.parts.visibility import Causal, SameDocument, SlidingWindow
from glassformer.training import AdamWConfig
from glassformer.training.gradients import clip, gradient_norm

BF16, GIB = torch.bfloat16, 1 << 30
ROUNDS = 10
CARDS = {"H100": "h100", "H200": "h200", "A100": "a100-80gb"}
"""A word in the name that torch gives a card -> the name of the card in `planning/machines.yaml`."""

Step = Callable[[], object]
Rows = list[dict[str, Any]]


def card() -> str | None:
    name = torch.cuda.get_device_name()
    return next((ours for word, ours in CARDS.items() if word in name), None)


def milliseconds(work: Step) -> float:
    """Milliseconds of one call, by events of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turn(sides: dict[str, Step], rounds: int, warm: int = 3) -> dict[str, float]:
    """Returns {side: median milliseconds}. A side that cannot run is left out, and the reason is printed."""
    took: dict[str, list[float]] = {}
    for name, work in sides.items():
        try:
            for _ in range(warm):
                work()
            torch.cuda.synchronize()
            took[name] = []
        except Exception as error:
            print(
                f"  {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True
            )
    for _ in range(rounds):
        for name in took:
            took[name].append(milliseconds(sides[name]))
    return {name: statistics.median(values) for name, values in took.items()}


def peak(work: Step) -> float:
    """Returns the peak of allocated memory in one call, in GiB, including earlier allocations."""
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# Training


def our_step(model: Model, batch: tuple[Tensor, Tensor], compiled: bool, whole: bool = False) -> Step:
    optimizer = AdamWConfig().create(model, 1e-4, 0.1)
    loss_of: Any = torch.compile(model.loss) if whole else model.loss

    def step() -> None:
        with compiled_regions(compiled):
            with torch.autocast("cuda", BF16):
                loss = loss_of(*batch)
            loss.backward()
        clip(model.parameters(), 1.0, gradient_norm(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def their_step(model: Any, batch: tuple[Tensor, Tensor], compiled: bool, nano: bool = False) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast("cuda", BF16):
            if nano:
                loss = run(*batch)
            else:
                loss = F.cross_entropy(run(batch[0]).logits.flatten(0, 1).float(), batch[1].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def training(name: str, theirs: Callable[[ModelConfig], Any], batch: int, nano: bool = False) -> dict[str, Any]:
    config = gf.preset(name)
    tokens = torch.randint(config.vocab_size, (batch, config.context + 1), device="cuda")
    both = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    ours, other = config.build(seed=0).cuda(), theirs(config).cuda()
    sides = {
        "glassformer": our_step(ours, both, False),
        "glassformer compiled": our_step(ours, both, True),
        "transformers": their_step(other, both, False),
        "transformers compiled": their_step(other, both, True),
    }
    if nano:
        sides["glassformer whole model compiled"] = our_step(ours, both, False, True)
        gpt = GPT(config.vocab_size, config.context, n_layer=12, n_head=12, n_embd=768).cuda()
        sides["nanoGPT compiled"] = their_step(gpt, both, True, True)
    found = in_turn(sides, ROUNDS)
    made = {side: peak(sides[side]) for side in found}
    known = card()
    plan = gf.plan(config, train=True, batch=batch, context=config.context, dtype=BF16, machine=known or "h100")
    assert plan.time is not None
    rows: Rows = [
        {
            "side": side, "ms": ms, "tokens_per_second": both[0].numel() / ms * 1e3,
            "mfu": plan.work.model_flops * both[0].numel() / ms * 1e3 / plan.time.peak if known else None,
            "peak_gib": made[side],
        }
        for side, ms in found.items()
    ]  # fmt: skip
    return {
        "model": name, "batch": batch, "context": config.context, "rows": rows,
        "planned_ms": 1e3 * plan.time.seconds if known else None, "planned_gib": plan.memory["total"] / GIB,
    }  # fmt: skip


def their_gpt2(config: ModelConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    given: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **given))


def their_llama(config: ModelConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    given: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=config.context,
            tie_word_embeddings=True, **given,
        )
    )  # fmt: skip


def train() -> Iterator[dict[str, Any]]:
    yield training("gpt2", their_gpt2, 16, nano=True)
    forget()
    yield training("llama-3.2-1b+context=2048", their_llama, 2)


# Decoding

PROMPT = NEW = 128


def streamed(model: Model, tokens: Tensor, step: CompiledStep) -> None:
    for _ in stream(model, tokens, NEW, compiled=step, stop_at_eos=False):
        pass


def their_text(model: Any, tokens: Tensor, **more: Any) -> Tensor:
    given = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    made: Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), **given, **more)
    return made


def decode() -> Iterator[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    ours = gf.preset("llama-3.2-1b").build(seed=0).bfloat16().cuda().eval()
    with tempfile.TemporaryDirectory() as folder:
        gf.save(ours, None, folder)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    theirs = theirs.to("cuda").eval()
    for batch in (1, 32):
        tokens = torch.randint(1000, (batch, PROMPT), device="cuda")
        step = CompiledStep(ours, batch, PROMPT + NEW).load()

        sides: dict[str, Step] = {
            "glassformer": partial(gf.generate, ours, tokens, NEW, stop_at_eos=False),
            "glassformer compiled": partial(streamed, ours, tokens, step),
            "transformers": partial(their_text, theirs, tokens),
            "transformers compiled": partial(their_text, theirs, tokens, cache_implementation="static"),
        }
        with torch.no_grad():
            found = in_turn(sides, 3, warm=2)
            same = (
                gf.generate(ours, tokens, 16, stop_at_eos=False)[:, PROMPT:]
                == their_text(theirs, tokens)[:, PROMPT : PROMPT + 16]
            )
        yield {
            "model": "llama-3.2-1b", "batch": batch, "agreement": float(same.float().mean()),
            "rows": [
                {"side": side, "ms": ms / NEW, "tokens_per_second": batch * NEW / ms * 1e3}
                for side, ms in found.items()
            ],
        }  # fmt: skip
        forget()


# Attention

TOKENS, HEADS, HEAD_DIM = 16384, 16, 64
KERNELS: dict[str, Kernel] = {
    "auto": Auto(), "flex": Flex(), "sdpa": Sdpa(), "banded": Banded(), "direct": Direct(), "naive": Naive(),
}  # fmt: skip
MOST_PAIRS = 1 << 30
"""Scores of a kernel that keeps all of them."""


def calls(s: int) -> dict[str, dict[str, Any]]:
    rows = TOKENS // s
    documents = torch.arange(s, device="cuda").div(s / 6, rounding_mode="floor").long().expand(rows, -1).contiguous()
    return {
        "causal": {"visibility": Causal()},
        "window 512": {"visibility": SlidingWindow(512)},
        "six documents": {"visibility": SameDocument(Causal(), documents)},
        "alibi": {"visibility": Causal(), "bias": Alibi(HEADS).bias(Pass(0, s))},
        "softcap": {"visibility": Causal(), "bias": softcap(30.0)},
        "grouped by 4": {"visibility": Causal(), "groups": 4},
        "grouped by 4, fp32": {"visibility": Causal(), "groups": 4, "dtype": torch.float32},
    }


def attention() -> Iterator[dict[str, Any]]:
    for which in calls(1024):
        for s in (1024, 4096, 16384):
            yield learning(which, s)
    for which in ("causal", "window 512", "alibi"):
        for s in (1, 8, 32, 64, 256):
            yield reading(which, s, 4096)


def learning(which: str, s: int) -> dict[str, Any]:
    """Measures a forward and backward pass of each kernel over TOKENS tokens in texts of s."""
    given = calls(s)[which]
    g, dtype = HEADS // given.pop("groups", 1), given.pop("dtype", BF16)
    shapes = [(TOKENS // s, s, n, HEAD_DIM) for n in (HEADS, g, g)]
    q, k, v = leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    call, upstream = AttentionCall(q, k, v, **given), torch.randn(shapes[0], device="cuda", dtype=dtype)
    scores = TOKENS * s * HEADS
    sides: dict[str, Step] = {}

    def both_ways(kernel: Callable[[AttentionCall], Tensor]) -> Step:
        return lambda: torch.autograd.grad(kernel(call), leaves, upstream)

    def of_torch(call: AttentionCall) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // g, 2).transpose(1, 2) for x in (call.k, call.v))
        return F.scaled_dot_product_attention(call.q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)

    most = {"naive": MOST_PAIRS, "sdpa": 4 * MOST_PAIRS if call.masked else scores, "direct": 0}
    for name, kernel in KERNELS.items():
        if not kernel.serves(call) and scores <= most.get(name, scores):
            sides[name] = both_ways(kernel)
    if call.plain:
        sides["torch"] = both_ways(of_torch)
    return {"which": which, "s": s, "t": s, "kernel": Auto().fastest(call.facts).name, "ms": in_turn(sides, 5, 2)}


@torch.no_grad()
def reading(which: str, s: int, t: int) -> dict[str, Any]:
    """Measures a forward pass of the last s of t tokens."""
    seen = SlidingWindow(512) if which == "window 512" else Causal()
    q, k, v = (torch.randn(8, x, n, HEAD_DIM, device="cuda", dtype=BF16) for x, n in ((s, 16), (t, 4), (t, 4)))
    call = AttentionCall(q, k, v, seen, Alibi(HEADS).bias(Pass(t - s, t)) if which == "alibi" else None)

    def once(kernel: Kernel) -> Step:
        return lambda: kernel(call)

    sides = {name: once(kernel) for name, kernel in KERNELS.items() if name != "flex" or s > 1}
    return {"which": which, "s": s, "t": t, "kernel": Auto().fastest(call.facts).name, "ms": in_turn(sides, 9, 2)}


# The page

SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"train": train, "decode": decode, "attention": attention}


def grid(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def page(found: dict[str, Any]) -> str:
    assert __doc__ is not None
    about = found["machine"]
    lines = ["# gpu", "", __doc__.split("\n\n")[0], "", *__doc__.strip().split("\n\n")[2:], ""]
    lines += [f"`python -m experiments.gpu`: {found['date']}, {about['card']}, driver {about['driver']}, torch "
              f"{about['torch']}, transformers {about['transformers']}.", ""]  # fmt: skip
    for one in found.get("train", []):
        best = min((row["ms"] for row in one["rows"] if row["side"].startswith("transformers")), default=float("nan"))
        lines += [f"{one['model']}, {one['batch']} x {one['context']} tokens a step", ""]
        lines += grid(
            ["side", "ms/step", "tokens/s", "MFU", "peak GiB", "times the faster transformers"],
            [[row["side"], f"{row['ms']:.1f}", f"{row['tokens_per_second']:,.0f}",
              "" if row["mfu"] is None else f"{row['mfu']:.1%}", f"{row['peak_gib']:.1f}", f"{best / row['ms']:.2f}"]
             for row in one["rows"]],
        )  # fmt: skip
        if one["planned_ms"] is not None:
            lines += [f"Planned: {one['planned_ms']:.1f} ms; {one['planned_gib']:.1f} GiB for one model; here the "
                      "weights of all sides are in memory.", ""]  # fmt: skip
    for one in found.get("decode", []):
        best = min((row["ms"] for row in one["rows"] if row["side"].startswith("transformers")), default=float("nan"))
        lines += [f"{one['model']} writing {one['batch']} at once; {one['agreement']:.0%} of the first 16 tokens are "
                  "the same", ""]  # fmt: skip
        lines += grid(
            ["side", "ms/token", "tokens/s", "times the faster transformers"],
            [[row["side"], f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{best / row['ms']:.2f}"]
             for row in one["rows"]],
        )  # fmt: skip
    if rows := found.get("attention"):
        names = [*KERNELS, "torch"]
        lines += [f"Attention: {TOKENS:,} tokens, {HEADS} heads of {HEAD_DIM}, forward and backward, ms; where queries "
                  "are fewer than keys, 8 sequences, 4 KV heads, forward only", ""]  # fmt: skip
        lines += grid(
            ["call", "queries", "keys", "auto takes", *names],
            [[one["which"], str(one["s"]), str(one["t"]), one["kernel"],
              *(f"{one['ms'][name]:.2f}" if name in one["ms"] else "" for name in names)] for one in rows],
        )  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def driver() -> str:
    try:
        return next(line for line in Path("/proc/driver/nvidia/version").read_text().split() if line[0].isdigit())
    except (OSError, StopIteration):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    about = {**machine.machine(), "card": torch.cuda.get_device_name(), "driver": driver(),
             "transformers": transformers.__version__}  # fmt: skip
    found: dict[str, Any] = {"machine": about, "date": time.strftime("%Y-%m-%d")}
    for name in asked.only:
        rows = found[name] = []
        began = time.perf_counter()
        try:
            for row in SECTIONS[name]():
                rows.append(row)
                print(f"{time.perf_counter() - began:.0f} s", json.dumps(row), file=sys.stderr, flush=True)
                if asked.out is not None:
                    asked.out.write_text(page(found), encoding="utf-8")
                    asked.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr, flush=True)
        forget()
    print(page(found))


if __name__ == "__main__":
    main()
