"""Perplexity in each precision: against the cross-entropy of the logits, over windows that are cut here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import glassformer as gf
from glassformer.cli import main
from glassformer.errors import Code
from glassformer.laboratory.quality import qualities, windows_of
from glassformer.loaded import Loaded
from glassformer.parts.quantized import own_product, quantize
from glassformer.text import prepare
from glassformer.text.subword import BPETokenizer
from tests.refused import refused

torch.set_num_threads(1)

TEXT = "".join(f"line {i} says that {i * i} is the square of {i}\n" for i in range(600))
TOKENIZER = BPETokenizer.train([TEXT], 300)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def loader(expression: str = "llama@1m", **more: object) -> Callable[[], Loaded]:
    name, *changes = expression.split("+")
    config = gf.preset("+".join([name, "layers=2", "vocab_size=300", "context=64", *changes]))

    def load() -> Loaded:
        model = config.build(seed=1).eval()
        with torch.no_grad():
            model.embedding.weight *= 10  # opinions
        return Loaded(model, config, **{"tokenizer": TOKENIZER, **more})  # type: ignore[arg-type]

    return load


def test_each_precision_is_measured(text: str) -> None:
    load = loader()
    rows = list(qualities(load, text, tokens=640))
    assert [(row.weights, row.head) for row in rows] == [
        ("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "int8"), ("int4", "int4"),
    ]  # fmt: skip
    held_out = prepare(text, TOKENIZER).validation.tokens
    count = (len(held_out) - 1) // 64
    starts = [64 * (i * count // 10) for i in range(10)]
    windows = torch.from_numpy(np.stack([held_out[start : start + 65] for start in starts]).astype(np.int64))
    size = len("".join(TOKENIZER.decode(row[1:].numpy()) for row in windows).encode())
    models = [load().model, load().model.bfloat16()]
    models += [quantize(load().model, row.weights, row.head) for row in rows[2:]]
    for row, model in zip(rows, models, strict=True):
        with torch.no_grad():
            nats = [float(cross_entropy(model(window[None, :-1])[0].double(), window[1:])) for window in windows]
        assert row.loss == pytest.approx(np.mean(nats), rel=1e-5) and (row.tokens, row.context) == (640, 64)
        assert row.perplexity == pytest.approx(math.exp(row.loss))
        assert row.bits_per_byte == pytest.approx(640 * row.loss / math.log(2) / size)
        assert row.change == pytest.approx(row.perplexity / rows[0].perplexity - 1)
    assert rows[0].change == 0 and len({row.loss for row in rows}) == 5
    assert abs(rows[2].change) < abs(rows[4].change)


def test_bytes(text: str) -> None:
    """Matrices of 4, 2, 1 or 5/8 bytes a weight, and scales; a tied table is read as a head until the head is packed,
    and an untied one is only looked up. Our own products have whole blocks of 16 rows."""
    load = loader("gpt2@1m+nobias")
    config = load().config
    d, v = config.d_model, 300
    head = (v + (-v % 16 if own_product("cpu") else 0)) * (d + 2)
    norms = sum(weight.numel() for weight in load().model.parameters() if weight.dim() == 1)
    blocks, rows_of_blocks = 2 * 12 * d * d, 2 * 9 * d  # q k v, output, up, down
    positions = 64 * d
    held = [row.bytes for row in qualities(load, text, tokens=64)]
    full = blocks + v * d + positions + norms
    rest = 4 * (v * d + positions + norms)
    assert held[:3] == [4 * full, 2 * full, rest + blocks + 2 * rows_of_blocks + head]
    assert held[3:] == [rest + blocks * 5 // 8 + head, rest + blocks * 5 // 8 + 320 * d * 5 // 8]
    read = [row.bytes_per_token for row in qualities(load, text, tokens=64)]
    assert read == [*held[:2], *(count - 4 * v * d for count in held[2:])]
    untied = list(qualities(loader("gpt2@1m+untied"), text, tokens=64))
    assert [row.bytes - row.bytes_per_token for row in untied] == [size * v * d for size in (4, 2, 4, 4, 4)]


def test_a_checkpoint_in_half_precision_is_measured_once(text: str) -> None:
    load = loader()

    def half() -> Loaded:
        loaded = load()
        loaded.model.bfloat16()
        return loaded

    rows = list(qualities(half, text, tokens=64))
    assert [row.weights for row in rows] == ["bfloat16", "int8", "int4", "int4"] and rows[0].change == 0


def test_windows_are_short_and_few(text: str) -> None:
    assert windows_of(TOKENIZER, 10_000, text, tokens=1).context == 512
    windows = windows_of(TOKENIZER, 32, text, tokens=100)
    assert windows.context == 32 and len(windows) == 3 and [one.batch.inputs.shape for one in windows] == [(1, 32)] * 3


def test_qualities_report_progress(text: str) -> None:
    told: dict[str, tuple[int, int | None]] = {}
    list(qualities(loader(), text, 320, lambda stage, done, total: told.update({stage: (done, total)})))
    names = ("float32", "bfloat16", "int8", "int4 with a head of int8", "int4")
    assert {name: told[name] for name in names} == dict.fromkeys(names, (5, 5))


def test_qualities_refuse_unfit_models_and_texts(text: str) -> None:
    short = f"{text}.short.txt"
    Path(short).write_text("a b c " * 300)
    wrong: list[tuple[Callable[[], Loaded], str, int, Code, str]] = [
        (loader(tokenizer=None), text, 64, "missing", "tokenizer"),
        (loader("llama@1m+bidirectional"), text, 64, "causal", "model"),
        (loader("t5@1m"), text, 64, "conflict", "model"),
        (loader("llama@1m+vocab_size=200"), text, 64, "range", "tokens"),
        (loader(), f"{text}.txt", 64, "unknown", "data"),
        (loader(), text, 0, "range", "tokens"),
        (loader("llama@1m+context=500"), short, 64, "range", "context"),
    ]
    for load, data, tokens, code, field in wrong:
        with refused(code=code, field=field):
            list(qualities(load, data, tokens))


def test_on_the_command_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = loader()()
    gf.save(made.model, TOKENIZER, tmp_path / "folder")
    arguments = ["inspect", str(tmp_path / "folder"), "--quality", "--data", text, "--tokens", "0.2k"]
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not err and found["data"] == text and [row["tokens"] for row in found["rows"]] == [192] * 5
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    for row in found["rows"]:
        assert f"{row['perplexity']:.4f}" in out and f"{row['weights']}, head {row['head']}: perplexity" in err
    assert "192 tokens in windows of 64" in out
    assert main(["inspect", "llama@1m", "--data", text]) == 2
    assert "data and tokens are for quality" in capsys.readouterr().err
    assert main(["inspect", "llama@1m", "--quality"]) == 2
    assert "config without weights" in capsys.readouterr().err


def test_rows_so_far_come_out(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loader()()
    gf.save(loaded.model, loaded.tokenizer, tmp_path / "model")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("glassformer.laboratory.quality.quantize", stop)
    command = ["inspect", str(tmp_path / "model"), "--quality", "--data", text, "--tokens", "200", "--json"]
    assert main(command) == 130
    found = json.loads(capsys.readouterr().out)
    assert [row["weights"] for row in found["rows"]] == ["float32", "bfloat16"] and found["error"]["code"] == "stopped"
