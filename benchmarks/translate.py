"""A translator of Marian's shape generating, against Hugging Face transformers.

`transformers`' MarianMTModel (6 + 6 layers, width 512, 8 heads, 58,101 tokens: 74 million parameters) with random
weights, drawn so that the text does not repeat itself, is saved and loaded by us. Both answer the same sources of 32
tokens with 64 tokens, the most likely one each time, one source at a time: first encoded, then generated with a
cache, nothing ends early. All sides are in one process and in turn: ours in fp32, and quantised to 16, 8 and 4 bits;
`transformers` in fp32 and bf16, in inference mode. Reported are tokens/s of whole calls, medians over the sources and
rounds, and whether the ids are those of `transformers` in fp32.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import glassformer as gf
from glassformer import machine
from glassformer.generation import stream

VOCAB, SOURCES, READ, NEW = 58_101, 3, 32, 64

Write = Callable[[torch.Tensor], list[int]]


def published() -> Any:
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=VOCAB, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512,
        activation_function="swish", scale_embedding=True, share_encoder_decoder_embeddings=True,
        decoder_start_token_id=VOCAB - 1, pad_token_id=VOCAB - 1, eos_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    with torch.no_grad():  # a tied head says what it has read again and again, unless the last norm turns it round
        model.model.decoder.layers[-1].final_layer_norm.weight.normal_()
    return model


def theirs(model: Any) -> Write:
    def write(source: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            out = model.generate(
                source, attention_mask=torch.ones_like(source), num_beams=1, do_sample=False, min_new_tokens=NEW,
                max_new_tokens=NEW, bad_words_ids=None,
            )  # fmt: skip
        return out[0, 1:].tolist()

    return write


def ours(folder: str, start: int, kind: str | None) -> Write:
    dtype = torch.float32 if kind is None else torch.bfloat16
    model = gf.load(folder, dtype=dtype, quantize=kind).model

    def write(source: torch.Tensor) -> list[int]:
        first = torch.tensor([[start]])
        ban = {0: -100.0}  # transformers lets no text end before min_new_tokens
        return [int(token) for token in stream(model, first, NEW, source=source, logit_bias=ban, stop_at_eos=False)]

    return write


def shared(texts: list[list[int]], others: list[list[int]]) -> float:
    """Returns the share of positions at which both have the same token."""
    whole = [(a, b) for one, two in zip(texts, others, strict=True) for a, b in zip(one, two, strict=True)]
    return statistics.mean(a == b for a, b in whole)


def run(rounds: int = 5, threads: int | None = None, quiet: bool = False) -> dict[str, Any]:
    how = machine.settings("cpu", threads=threads)
    machine.apply(how)
    other = published()
    start = other.config.decoder_start_token_id
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        sides = {f"glassformer {name}": ours(folder, start, kind) for name, kind in
                 (("fp32", None), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"))}  # fmt: skip
    half = published().to(torch.bfloat16)
    sides |= {"transformers fp32": theirs(other), "transformers bf16": theirs(half)}
    draw = torch.Generator().manual_seed(1)
    sources = [torch.randint(1, VOCAB - 1, (1, READ), generator=draw) for _ in range(SOURCES)]
    texts = {name: [write(source) for source in sources] for name, write in sides.items()}
    took: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for source in sources:
            for name, write in sides.items():
                began = time.perf_counter()
                write(source)
                took[name].append(time.perf_counter() - began)
        if not quiet:
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    speed = {name: NEW / statistics.median(values) for name, values in took.items()}
    right = texts["transformers fp32"]
    alike = {name: shared(found, right) for name, found in texts.items()}
    base = speed["transformers fp32"]
    lines = ["| side | tokens/s | against transformers fp32 | ids as transformers fp32 |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {speed[name]:.1f} | {speed[name] / base:.2f} | {alike[name]:.0%} |" for name in sides]
    different = len({token for text in right for token in text})
    lines += [
        "",
        f"{how.threads} threads; {SOURCES} sources, {rounds} rounds; of the {SOURCES * NEW} tokens of `transformers` "
        f"in fp32 {different} are different ones. Of random weights the most likely token has little lead, so fewer "
        "bits soon lead to another text; in fp32 it has to be the same.",
    ]
    return {
        "machine": machine.machine(), "rounds": rounds, "threads": how.threads, "tokens_per_second": speed,
        "alike": alike, "seconds": took, "table": "\n".join(lines),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(run()))
