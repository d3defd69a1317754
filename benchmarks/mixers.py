"""Every mixer's cost against the length of the text.

A row measures one mixer without the rest of a model: width 256, 4 heads, fp32, one sequence. Training is a forward and
a backward pass of x (1, s, 256), prefill a forward pass without gradients; both are the fastest of rounds, because
other work on the machine only adds time. Freed memory is kept, as in training runs. Memory is the peak growth of the
process' resident set over the same pass. Decoding is the median time of one token, with a state that has room for the
context and counts as full; state is its allocated bytes. A mixer stops at the length whose pass would exceed the limit.

An exponent is the slope of the logarithm of the cost over that of the length, by least squares over the lengths from
1024 on, with its 95 % interval by Student's t. Crossing is the least length at which a mixer costs less than
attention, interpolated between measured lengths in the logarithms. Rows named `transformers ...` are the published
classes in the same process. `against transformers` measures both sides in turn, after one warm-up round: training
passes, a decoding step of DeepSeek-V2-Lite's attention, and experts of width 896 in a model of 512, two of eight for a
token, against Mixtral's block, a dense FFN of the active size, and the experts' matmuls without the rest of the block.

`--only a,b` measures some rows and keeps the others from the JSON file next to `--out`; picture and page show all rows.
A new mixer is one line of `ROWS`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import glassformer as gf
from benchmarks import among, measured_before
from glassformer import machine
from glassformer.errors import RequestError
from glassformer.parts.ffn import Experts, Glu, Router
from glassformer.parts.forward_pass import Pass

WIDTH, HEADS = 256, 4
BASE = f"llama@1m+layers=1+d_model={WIDTH}+heads={HEADS}+vocab_size=256+context=65536"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CONTEXTS = (512, 2048, 8192, 32768, 65536)
FITTED_FROM = 1024
LIMIT = 8.0
"""Seconds: a pass that would take longer is not measured."""
ENOUGH = 1.5
"""Seconds of one measurement after which no further round is taken, once there are two."""
ATTENTION = "attention"
# The two-sided 95 % quantile of Student's t, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


@dataclass(frozen=True)
class Row:
    """A mixer, given by its change of BASE, or a published class: `peer()` returns a module that maps x (1, s, d) to
    (1, s, d), or to a tuple whose first element has that shape."""

    change: str = ""
    peer: Callable[[], nn.Module] | None = None

    def build(self) -> nn.Module:
        if self.peer is not None:
            return self.peer()
        return gf.preset(BASE + self.change).build(seed=0).layers[0].mixer  # type: ignore[return-value]


def lightning() -> nn.Module:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(hidden_size=WIDTH, num_attention_heads=HEADS, head_dim=WIDTH // HEADS, num_hidden_layers=1,
                           layer_types=["linear_attention"])  # fmt: skip
    return _Called(MiniMaxLightningAttention(config, 0), None, None)


def mamba2() -> nn.Module:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(hidden_size=WIDTH, num_heads=2 * WIDTH // 64, head_dim=64, n_groups=1, num_hidden_layers=1)
    return Mamba2Mixer(config, 0)


def deltanet() -> nn.Module:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    size = WIDTH // HEADS
    config = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_key_heads=HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=size,
        linear_value_head_dim=size, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return Qwen3NextGatedDeltaNet(config, 0)


ROWS: dict[str, Row] = {
    ATTENTION: Row(),
    "linear attention": Row("+linear_attention"),
    "retention": Row("+retention+mixer.expand=1"),
    "lightning": Row("+lightning"),
    "performer, 128 features": Row("+performer:128"),
    "linformer, 128 keys": Row("+linformer:128+bidirectional"),
    "xl memory of 256": Row("+xl_memory:256"),
    "window of 256": Row("+window:256"),
    "latent attention": Row("+mla"),
    "longformer, 256 and 4": Row("+longformer:256:4"),
    "bigbird, blocks of 64": Row("+bigbird:64"),
    "dilated, 256 by 4": Row("+dilated:256:4"),
    "chunked by 256": Row("+chunked:256"),
    "two-sided longformer": Row("+nope+bias+longformer:256:1+visibility.causal=false+mixer.kind=global_attention"),
    "two-sided bigbird": Row("+nope+bias+bigbird:64+visibility.causal=false"),
    "mamba": Row("+mamba+mixer.expand=1"),
    "mamba2": Row("+mamba2"),
    "gated deltanet": Row("+gated_deltanet"),
    "s4": Row("+s4"),
    "rglru": Row("+rglru"),
    "lstm": Row("+lstm"),
    "gru": Row("+gru"),
    "gated convolution of 4": Row("+conv:4"),
    "transformers lightning": Row(peer=lightning),
    "transformers mamba2": Row(peer=mamba2),
    "transformers deltanet": Row(peer=deltanet),
}


Runs = dict[str, Callable[[], Any]]
"""Sides of a comparison, ours first."""
OURS, THEIRS = "ours", "transformers"


def passes(change: str, peer: Callable[[], nn.Module], s: int) -> Runs:
    """Returns training passes of a mixer of ours and of the peer's, over s tokens."""
    return {OURS: partial(train, Row(change).build(), s), THEIRS: partial(train, peer(), s)}


def mamba() -> nn.Module:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    return MambaMixer(MambaConfig(hidden_size=WIDTH, num_hidden_layers=1, state_size=16, expand=1), 0)


def longformer() -> nn.Module:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[256],
                              attention_probs_dropout_prob=0.0)  # fmt: skip
    return _Masked(LongformerSelfAttention(config, 0), _of_globals)


def _of_globals(x: Tensor) -> tuple[Any, ...]:
    """Returns the arguments of Longformer's attention after x, for a text whose first token is global."""
    mask = torch.zeros(x.shape[:2])
    mask[:, 0] = 10000.0
    return mask, mask < 0, mask > 0, True


def bigbird() -> nn.Module:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(hidden_size=WIDTH, num_attention_heads=HEADS, block_size=64, num_random_blocks=3,
                           attention_probs_dropout_prob=0.0, max_position_embeddings=1 << 16)  # fmt: skip

    def masks(x: Tensor) -> tuple[Any, ...]:
        blocked, band, *sides = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(x.shape[:2]), 64)
        return band, *sides, blocked, blocked

    return _Masked(BigBirdBlockSparseAttention(config, seed=0), masks)


@torch.no_grad()
def latent_step(context: int) -> Runs:
    """Returns decoding steps with the attention of DeepSeek-V2-Lite, ours and theirs, after `context` tokens."""
    from transformers import DeepseekV2Config, DynamicCache
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as published

    config = DeepseekV2Config(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=1,
        max_position_embeddings=2 * context,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    theirs, rope = published.DeepseekV2Attention(config, 0).eval(), published.DeepseekV2RotaryEmbedding(config)
    cache = DynamicCache(config=config)
    whole, x = torch.randn(1, context, 2048), torch.randn(1, 1, 2048)
    theirs(whole, position_embeddings=rope(whole, torch.arange(context)[None]), attention_mask=None,
           past_key_values=cache)  # fmt: skip
    name = f"llama@1m+layers=1+d_model=2048+heads=16+vocab_size=64+context={2 * context}+mla"
    mixer: Any = gf.preset(name).build(seed=0).eval().layers[0].mixer
    state, at = mixer.init_state(1, context + 1, torch.float32), rope(x, torch.tensor([[context]]))
    return {
        OURS: torch.no_grad()(lambda: mixer(x, Pass(context, context + 1), state)),
        THEIRS: torch.no_grad()(lambda: theirs(x, position_embeddings=at, attention_mask=None, past_key_values=cache)),
    }


EXPERT_WIDTH, EXPERT_HIDDEN, EXPERTS, CHOSEN = 512, 896, 8, 2


def experts(tokens: int) -> Runs:
    """Returns training passes of our experts, of Mixtral's block and of a dense FFN of the active size; `products` runs
    only the experts' matmuls, forward and backward, with equal rows per expert."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    d, f, e, k = EXPERT_WIDTH, EXPERT_HIDDEN, EXPERTS, CHOSEN
    config = MixtralConfig(hidden_size=d, intermediate_size=f, num_local_experts=e, num_experts_per_tok=k)
    theirs = MixtralSparseMoeBlock(config)
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.02)
    sides = {OURS: Experts(d, f, Router(d, e, k)), THEIRS: theirs, "dense": Glu(d, k * f)}
    x, hidden = torch.randn(tokens * k // e, d), torch.randn(tokens * k // e, f)
    up, down = torch.randn(f, d), torch.randn(d, f)

    def products() -> None:
        for _ in range(e):
            x @ up.t(), x @ up.t(), hidden @ down.t()
            hidden @ up, hidden @ up, x @ down
            hidden.t() @ x, hidden.t() @ x, x.t() @ hidden

    runs: Runs = {name: partial(train, module, tokens, d) for name, module in sides.items()}
    return {**runs, "products": products}


PAIRS: dict[str, Callable[[], Runs]] = {
    f"against transformers: {name}": runs
    for name, runs in {
        "mamba, 2,048 tokens": partial(passes, "+mamba+mixer.expand=1", mamba, 2048),
        "mamba2, 2,048 tokens": partial(passes, "+mamba2", mamba2, 2048),
        "deltanet, 2,048 tokens": partial(passes, "+gated_deltanet", deltanet, 2048),
        "longformer, 2,048 tokens": partial(passes, ROWS["two-sided longformer"].change, longformer, 2048),
        "longformer, 8,192 tokens": partial(passes, ROWS["two-sided longformer"].change, longformer, 8192),
        "bigbird, 2,048 tokens": partial(passes, ROWS["two-sided bigbird"].change, bigbird, 2048),
        "bigbird, 8,192 tokens": partial(passes, ROWS["two-sided bigbird"].change, bigbird, 8192),
        "latent attention, a step after 4,096 tokens": partial(latent_step, 4096),
        "experts, 64 tokens": partial(experts, 64),
        "experts, 256 tokens": partial(experts, 256),
        "experts, 2,048 tokens": partial(experts, 2048),
        "experts, 8,192 tokens": partial(experts, 8192),
    }.items()
}


class _Masked(nn.Module):
    """A published module, called with x and what is made of it."""

    def __init__(self, module: nn.Module, masks: Callable[[Tensor], tuple[Any, ...]]):
        super().__init__()
        self.module, self.masks = module, masks

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, *self.masks(x))[0]


class _Called(nn.Module):
    """A published module, called with x and these."""

    def __init__(self, module: nn.Module, *rest: Any):
        super().__init__()
        self.module, self.rest = module, rest

    def forward(self, x: Tensor) -> Tensor:
        made = self.module(x, *self.rest)
        return made[0] if isinstance(made, tuple) else made


# Measuring


def train(module: nn.Module, s: int, width: int = WIDTH) -> None:
    x = torch.randn(1, s, width, requires_grad=True)
    module.zero_grad(set_to_none=True)
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.ones_like(y))


@torch.no_grad()
def prefill(module: nn.Module, s: int) -> None:
    module(torch.randn(1, s, WIDTH))


def timed(run: Callable[[], None], rounds: int) -> float:
    """Returns the seconds of the fastest round."""
    took: list[float] = []
    while len(took) < rounds and (len(took) < 2 or sum(took) < ENOUGH):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


def in_turn(runs: Runs, rounds: int) -> dict[str, float]:
    """Returns the seconds of each side's fastest round. A side slower than LIMIT has one round, without warm-up."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(2 * rounds + 1):
        for name, run in runs.items():
            if max(took[name], default=0.0) < LIMIT:
                began = time.perf_counter()
                run()
                took[name].append(time.perf_counter() - began)
        if turn > 1 and sum(map(sum, took.values())) > 4 * ENOUGH:
            break
    return {name: min(times[1:] or times) for name, times in took.items()}


def grown(run: Callable[[], object]) -> int | None:
    """Returns the peak growth of the resident set in bytes; None if the system does not report it."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _resident("VmRSS")
        run()
        return max(0, _resident("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(name)


@torch.inference_mode()
def decode(module: Any, context: int, rounds: int) -> dict[str, float]:
    """Returns the median seconds of decoding one token after `context` tokens, and the bytes of the state."""
    state = module.init_state(1, context + 1, torch.float32)
    x, times = torch.randn(1, 1, WIDTH), []
    for turn in range(3 + 4 * rounds):
        began = time.perf_counter()
        module(x, Pass(context, context + 1), state)
        if turn >= 3:
            times.append(time.perf_counter() - began)
    return {"seconds": statistics.median(times), "state": state.nbytes}


def measured(row: Row, rounds: int, lengths: Sequence[int], contexts: Sequence[int]) -> dict[str, Any]:
    """Returns {"train": {s: seconds}, "prefill": {s: seconds}, "memory": {s: bytes}, "decode": {t: seconds}, "state":
    {t: bytes}}; the keys s and t are text."""
    found: dict[str, dict[int, float]] = {name: {} for name in ("train", "prefill", "memory", "decode", "state")}
    module = row.build()
    for name, run in (("train", train), ("prefill", prefill)):
        last = 0.0
        for s in lengths:
            if 4.5 * last > LIMIT:  # as if its cost were quadratic
                break
            if name == "train":
                grew = grown(partial(train, module, s))  # also the first, which warms up
                if grew is not None:
                    found["memory"][s] = grew
            else:
                run(module, s)
            last = found[name][s] = timed(partial(run, module, s), rounds)
    if row.peer is None and module.causal:
        for t in contexts:
            try:
                one = decode(module, t, rounds)
            except RequestError:  # an encoder
                break
            found["decode"][t], found["state"][t] = one["seconds"], one["state"]
    return {name: {str(at): value for at, value in values.items()} for name, values in found.items()}


# Reading


def exponent(costs: Mapping[int, float]) -> tuple[float, float] | None:
    """Returns the slope of log cost over log length from `FITTED_FROM` on, and the half width of its 95 % interval;
    None with fewer than three points."""
    pairs = [(math.log(s), math.log(cost)) for s, cost in costs.items() if s >= FITTED_FROM and cost > 0]
    if len(pairs) < 3:
        return None
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in pairs)
    free = len(pairs) - 2
    return slope, STUDENT[free] * math.sqrt(left / free / spread)


def crossing(costs: Mapping[int, float], attention: Mapping[int, float]) -> str:
    """Returns, as text, the least length at which the costs fall below attention's; "" without common lengths."""
    both = sorted(set(costs) & set(attention))
    if not both:
        return ""
    gaps = [math.log(costs[s] / attention[s]) for s in both]
    if gaps[-1] > 0:
        return f"not up to {both[-1]:,}"
    last = max((i for i, gap in enumerate(gaps) if gap > 0), default=None)
    if last is None:
        return f"below {both[0]:,}" if both[0] > min(LENGTHS) else f"{both[0]:,} or less"
    part = gaps[last] / (gaps[last] - gaps[last + 1])
    return f"{round(both[last] * (both[last + 1] / both[last]) ** part):,}"


def _numbers(row: Mapping[str, Any], name: str) -> dict[int, float]:
    return {int(at): value for at, value in row.get(name, {}).items()}


def _shown(found: tuple[float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f} ± {found[1]:.2f}"


def pairs_table(pairs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns the Markdown of the pairs measured in turn."""
    if not pairs:
        return []
    sides = list(dict.fromkeys(name for one in pairs.values() for name in one))
    lines = ["In turn, ms:", "", f"| | {' | '.join(sides)} | transformers / ours | ours / dense | ours / products |",
             "|---|" + "--:|" * (len(sides) + 3)]  # fmt: skip
    for name, one in pairs.items():
        cells = [f"{1e3 * one[side]:,.1f}" if side in one else "" for side in sides]
        ratios = ((THEIRS, OURS), (OURS, "dense"), (OURS, "products"))
        cells += [f"{one[a] / one[b]:.2f}" if a in one and b in one else "" for a, b in ratios]
        lines.append(f"| {name.partition(': ')[2]} | {' | '.join(cells)} |")
    return [*lines, ""]


def table(rows: Mapping[str, Any]) -> str:
    """Returns the Markdown of all rows."""
    attention = rows.get(ATTENTION, {})
    lines = ["Exponents, and the least length at which a mixer costs less than attention:", "",
             "| mixer | training | prefill | memory | faster in training from | in prefill from | smaller from |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for name, row in rows.items():
        fits = [_shown(exponent(_numbers(row, what))) for what in ("train", "prefill", "memory")]
        meets = ["" if name == ATTENTION else crossing(_numbers(row, what), _numbers(attention, what))
                 for what in ("train", "prefill", "memory")]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(fits + meets)} |")
    for what, title, digits, unit in (
        ("train", "Training, ms by length", 1, 1e-3), ("prefill", "Prefill, ms by length", 1, 1e-3),
        ("memory", "Memory of training, MB by length", 0, 1e6), ("decode", "A token, ms by context", 3, 1e-3),
        ("state", "State, kB by context", 0, 1e3),
    ):  # fmt: skip
        given = {name: _numbers(row, what) for name, row in rows.items()}
        at = sorted({length for costs in given.values() for length in costs})
        lines += ["", f"{title}:", "", "| mixer | " + " | ".join(f"{length:,}" for length in at) + " |",
                  "|---|" + "--:|" * len(at)]  # fmt: skip
        for name, costs in given.items():
            cells = " | ".join(f"{costs[length] / unit:,.{digits}f}" if length in costs else "" for length in at)
            if costs:
                lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def draw(rows: Mapping[str, Any], path: Path) -> None:
    """Draws one picture: time and memory of training, time and state of decoding, against the length."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    from glassformer.lens import style

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = (
        ("train", "training, seconds", "tokens"), ("memory", "training, bytes", "tokens"),
        ("decode", "one token, seconds", "tokens read before"), ("state", "decode state, bytes", "tokens read before"),
    )  # fmt: skip
    axes = style.axes(figure, 2, 2, title="What mixing tokens costs")
    markers = "osD^vP*X"
    for ax, (what, title, x) in zip(axes.flat, panels, strict=True):
        for i, (name, row) in enumerate(rows.items()):
            points = sorted(_numbers(row, what).items())
            if points:
                dashes = "--" if name.startswith("transformers") else "-"
                colour = style.COLOURS[i % len(style.COLOURS)]
                ax.plot(*zip(*points, strict=True), dashes, marker=markers[i // len(style.COLOURS) % len(markers)],
                        color=colour, label=name, markersize=4, linewidth=1.4)  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(title, loc="left", color=style.INK, fontsize=9)
        ax.set_xlabel(x, color=style.INK, fontsize=9)
        ticks = LENGTHS if x == "tokens" else CONTEXTS
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "glassformer", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def run(
    rounds: int = 5,
    threads: int | None = None,
    quiet: bool = False,
    quick: bool = False,
    only: str | None = None,
    out: str | None = None,
) -> dict[str, Any]:
    """Measures the rows; with `only`, the others come from the JSON file next to `out`."""
    names = among([*ROWS, *PAIRS], only)
    machine.apply(machine.settings("cpu", threads=threads))
    here, kept = machine.machine(), Path(out).with_suffix(".json") if out else None
    lengths, contexts = (LENGTHS[:2], CONTEXTS[:2]) if quick else (LENGTHS, CONTEXTS)
    before = measured_before(kept) if kept is not None and only is not None else {}
    rows: dict[str, Any] = before.get("rows", {})
    pairs: dict[str, Any] = before.get("pairs", {})
    for name in names:
        if name in PAIRS:
            pairs[name] = in_turn(PAIRS[name](), rounds)
            said: Any = pairs[name]
        else:
            rows[name] = measured(ROWS[name], rounds, lengths, contexts)
            said = {what: list(costs.values())[-1:] for what, costs in rows[name].items()}
        result = {"machine": here, "rounds": rounds, "rows": rows, "pairs": pairs}
        if kept is not None:  # what is measured stays, whatever ends this
            kept.write_text(json.dumps(result, indent=1), encoding="utf-8")
        if not quiet:
            print(name, said, file=sys.stderr, flush=True)
    rows = {name: rows[name] for name in ROWS if name in rows}
    pairs = {name: pairs[name] for name in PAIRS if name in pairs}
    result = {"machine": here, "rounds": rounds, "rows": rows, "pairs": pairs}
    text = "\n".join([*pairs_table(pairs), table(rows)])
    if kept is not None:
        kept.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(rows, kept.with_suffix(".svg"))
        text = f"![what mixing tokens costs]({kept.with_suffix('.svg').name})\n\n{text}"
    return {**result, "table": text}
