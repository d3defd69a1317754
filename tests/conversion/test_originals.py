"""Checkpoints as nanoGPT, Meta and Mistral leave them, against their published code and conversions."""

from __future__ import annotations

import json
import math
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

import glassformer as gf
from glassformer.cli import main
from glassformer.conversion import checkpoints
from glassformer.conversion.storage import PickledFile
from glassformer.conversion.storage.pickled import value_of
from glassformer.errors import RequestError
from tests.refused import refused

TOKENS = torch.randint(61, (2, 23), generator=torch.Generator().manual_seed(5))


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Returns random weights: norms near 1, matrices that keep the size of their input."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=draw) / shape[-1] ** 0.5
        if len(shape) == 2
        else torch.randn(shape, generator=draw) * 0.3 + ("norm" in name or "ln_" in name) * name.endswith("weight")
        for name, shape in shapes.items()
    }


# nanoGPT


ARGUMENTS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "bias": True, "vocab_size": 61, "dropout": 0.2}


def nanogpt(bias: bool) -> dict[str, Tensor]:
    """Returns the state dict of nanoGPT's model.py, whose embedding is the head."""
    d, shapes = 16, dict[str, tuple[int, ...]]()
    shapes |= {"transformer.wte.weight": (61, d), "transformer.wpe.weight": (32, d), "transformer.ln_f.weight": (d,)}
    for i in range(2):
        at = f"transformer.h.{i}."
        shapes |= {f"{at}ln_1.weight": (d,), f"{at}ln_2.weight": (d,)}
        maps = {"attn.c_attn": (3 * d, d), "attn.c_proj": (d, d), "mlp.c_fc": (4 * d, d), "mlp.c_proj": (d, 4 * d)}
        shapes |= {f"{at}{name}.weight": shape for name, shape in maps.items()}
    if bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if ".h." in name}
        shapes["transformer.ln_f.bias"] = (d,)
    weights = drawn(shapes)
    return {**weights, "lm_head.weight": weights["transformer.wte.weight"]}


def computed(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Returns the logits of the forward pass in nanoGPT's model.py."""
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    for i in range(2):
        at = f"transformer.h.{i}."
        qkv = linear(f"{at}attn.c_attn", norm(f"{at}ln_1", x)).split(16, dim=2)
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(f"{at}attn.c_proj", y)
        x = x + linear(f"{at}mlp.c_proj", F.gelu(linear(f"{at}mlp.c_fc", norm(f"{at}ln_2", x))))
    return F.linear(norm("transformer.ln_f", x), w["lm_head.weight"])


def checkpoint(place: Path, weights: dict[str, Tensor], **arguments: Any) -> Path:
    """Saves as nanoGPT's train.py does: the model, its optimizer, its arguments, its progress."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(one.sum() for one in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    saved = {
        "model": OrderedDict(weights), "optimizer": optimizer.state_dict(), "model_args": {**ARGUMENTS, **arguments},
        "iter_num": 250, "best_val_loss": torch.tensor(1.88), "config": {"dataset": "shakespeare_char"},
    }  # fmt: skip
    torch.save(saved, place / "ckpt.pt")
    return place / "ckpt.pt"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wrapped", ["", "_orig_mod."])
def test_nanogpt_checkpoint_has_equal_logits(bias: bool, wrapped: str, tmp_path: Path) -> None:
    weights = nanogpt(bias)
    path = checkpoint(tmp_path, {f"{wrapped}{name}": weight for name, weight in weights.items()}, bias=bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = gf.load(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(TOKENS), computed(weights, TOKENS), rtol=0, atol=2e-5)
    unique = {weight.data_ptr(): weight for weight in weights.values()}
    assert loaded.config.num_params() == sum(weight.numel() for weight in unique.values()) and loaded.config.head.tied
    assert gf.preset(str(path)) == loaded.config and gf.check(path, progress=False).passed


def test_a_checkpoint_of_nanogpt_is_a_model_for_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint(tmp_path, nanogpt(True))
    assert main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert main(["inspect", str(path), "--exports"]) == 0
    capsys.readouterr()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, computed(nanogpt(True), TOKENS), rtol=0, atol=2e-5)


def test_buffers_of_masks_are_ignored(tmp_path: Path) -> None:
    """nanoGPT without flash attention keeps its mask."""
    weights = nanogpt(True)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(32, 32).tril()[None, None] for i in range(2)}
    path = checkpoint(tmp_path, {**weights, **masks})
    with torch.no_grad():
        torch.testing.assert_close(gf.load(path).model(TOKENS), computed(weights, TOKENS), rtol=0, atol=2e-5)


def test_arguments_of_nanogpt_are_read_whole(tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as told:
        gf.load(checkpoint(tmp_path, nanogpt(True), twist=1))
    assert [str(one.message).rpartition(": ")[2] for one in told] == ["twist"]
    with refused(code="missing", field="model_args.block_size"):
        gf.load(checkpoint(tmp_path, nanogpt(True), block_size=None))
    with refused(code="conflict", field="tensor transformer.wte.weight"):
        gf.load(checkpoint(tmp_path, nanogpt(True), vocab_size=62))
    with refused(code="unknown", field="tensor transformer.h.0.twist"):
        gf.load(checkpoint(tmp_path, {**nanogpt(True), "transformer.h.0.twist": torch.ones(2)}))


# Meta and Mistral


def consolidated(n: int, g: int, h: int, d: int, hidden: int, layers: int = 2) -> dict[str, Tensor]:
    """Returns the state dict of Meta's llama/model.py."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (61, d),
        "norm.weight": (d,),
        "output.weight": (61, d),
    }
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {
            f"{at}attention.wq.weight": (n * h, d), f"{at}attention.wk.weight": (g * h, d),
            f"{at}attention.wv.weight": (g * h, d), f"{at}attention.wo.weight": (d, n * h),
            f"{at}feed_forward.w1.weight": (hidden, d), f"{at}feed_forward.w2.weight": (d, hidden),
            f"{at}feed_forward.w3.weight": (hidden, d), f"{at}attention_norm.weight": (d,),
            f"{at}ffn_norm.weight": (d,),
        }  # fmt: skip
    return drawn(shapes, 1)


def of_meta(w: dict[str, Tensor], n: int, g: int, h: int, tokens: Tensor, theta: float = 1e4) -> Tensor:
    """Returns the logits of Meta's llama/model.py, which rotates adjacent pairs as complex numbers."""
    x = w["tok_embeddings.weight"][tokens]
    frequencies = theta ** -(torch.arange(0, h, 2).double() / h)
    turns = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(tokens.shape[1]).double(), frequencies))

    def norm(name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)

    for i in range(2):
        at = f"layers.{i}."
        y = norm(f"{at}attention_norm", x)
        q, k, v = (y @ w[f"{at}attention.w{name}.weight"].T for name in "qkv")
        q, k, v = q.unflatten(-1, (n, h)), k.unflatten(-1, (g, h)), v.unflatten(-1, (g, h))
        q, k = turned(q), turned(k)
        k, v = (one.repeat_interleave(n // g, dim=2) for one in (k, v))
        scores = torch.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(h)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        z = torch.einsum("bnst,btnh->bsnh", pattern, v).flatten(2)
        x = x + z @ w[f"{at}attention.wo.weight"].T
        y = norm(f"{at}ffn_norm", x)
        gate, up = (y @ w[f"{at}feed_forward.w{name}.weight"].T for name in (1, 3))
        x = x + (F.silu(gate) * up) @ w[f"{at}feed_forward.w2.weight"].T
    return norm("norm", x) @ w["output.weight"].T


META = {"dim": 32, "n_layers": 2, "n_heads": 4, "multiple_of": 16, "norm_eps": 1e-5, "vocab_size": -1}


def folder(place: Path, params: dict[str, Any], weights: dict[str, Tensor], name: str = "consolidated.00.pth") -> Path:
    place.mkdir(exist_ok=True)
    (place / "params.json").write_text(json.dumps(params))
    (save_file if name.endswith("safetensors") else torch.save)(weights, place / name)
    return place


@pytest.mark.filterwarnings("ignore:.*says no context")
def test_folder_of_meta_has_equal_logits(tmp_path: Path) -> None:
    """The hidden width is that of llama/model.py: int(2 * 4 * 32 / 3) = 85, up to a multiple of 16."""
    weights = consolidated(4, 4, 8, 32, 96)
    weights["rope.freqs"] = torch.ones(4)
    loaded = gf.load(folder(tmp_path, META, weights))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(TOKENS), of_meta(weights, 4, 4, 8, TOKENS), rtol=0, atol=2e-5)
    assert gf.check(tmp_path, progress=False).passed


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated.00.pth"])
def test_folder_of_mistral_has_equal_logits(name: str, tmp_path: Path) -> None:
    weights = consolidated(4, 2, 6, 32, 40)
    params = {"dim": 32, "n_layers": 2, "head_dim": 6, "hidden_dim": 40, "n_heads": 4, "n_kv_heads": 2,
              "norm_eps": 1e-5, "vocab_size": 61, "rope_theta": 1e6, "max_seq_len": 64}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = gf.load(folder(tmp_path, params, weights, name))
    expected = of_meta(weights, 4, 2, 6, TOKENS, 1e6)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(TOKENS), expected, rtol=0, atol=2e-5)
        gf.convert(loaded, tmp_path / "out", progress=False)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=0, atol=2e-5)
    assert loaded.config.context == 64


def test_the_window_of_mistral_is_kept(tmp_path: Path) -> None:
    params = {**META, "hidden_dim": 40, "n_kv_heads": 4, "sliding_window": 8, "max_seq_len": 64}
    config = gf.preset(str(folder(tmp_path, params, consolidated(4, 4, 8, 32, 40))))
    assert "window=8" in str(config) or next(config.layers()).mixer.visibility.window == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "release", "context", "factor"),
    [
        ({"norm_eps": 1e-6}, "Llama 1", 2048, None),
        ({}, "Llama 2", 4096, None),
        ({"rope_theta": 1e6}, "Llama 3", 8192, None),
        ({"rope_theta": 500000.0}, "Llama 3", 8192, None),
        ({"rope_theta": 500000.0, "use_scaled_rope": True}, "Llama 3.1", 131072, 8.0),
    ],
)
def test_settings_missing_in_params_warn(
    more: dict[str, Any], release: str, context: int, factor: float | None, tmp_path: Path
) -> None:
    """Contexts of the releases: CONTEXT_LENGTH_FOR_VERSION of transformers' convert_llama_weights_to_hf.py."""
    place = folder(tmp_path, {**META, **more}, consolidated(4, 4, 8, 32, 96))
    with pytest.warns(UserWarning) as told:
        config = gf.preset(str(place))
    assert len(told) == 1 and release in str(told[0].message) and f"{context:,}" in str(told[0].message)
    assert config.context == context
    scaling = next(config.layers()).mixer.position.scaling  # type: ignore[union-attr]
    assert (scaling and scaling.factor) == factor


@pytest.mark.filterwarnings("ignore:.*says no context")
def test_params_are_read_whole(tmp_path: Path) -> None:
    weights = consolidated(4, 4, 8, 32, 96)
    for more, code, field in (
        ({"moe": {"num_experts": 8}}, "unsupported", "moe"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "unsupported", "quantization"),
        ({"vocab_size": 62}, "conflict", "vocab_size"),
        ({"n_layers": 3}, "missing", "tensor layers.2.attention.wq.weight"),
        ({"dim": None}, "missing", "dim"),
        ({"multiple_of": 32, "dim": 64}, "conflict", "tensor tok_embeddings.weight"),
    ):
        with pytest.raises(RequestError) as problem:
            gf.load(folder(tmp_path, {**META, **more}, weights))
        assert (problem.value.code, problem.value.field) == (code, field)
    with pytest.warns(UserWarning) as told:
        gf.load(folder(tmp_path, {**META, "twist": 1}, weights))
    assert "twist" in [str(one.message).rpartition(": ")[2] for one in told]


@pytest.mark.filterwarnings("ignore:.*says no context")
@pytest.mark.parametrize(("ranks", "axis"), [(2, 1), (4, 0)])
def test_weights_cut_between_ranks_are_joined(ranks: int, axis: int, tmp_path: Path) -> None:
    """The cuts of llama/model.py: ColumnParallelLinear by rows, RowParallelLinear by columns, the embedding by width
    in Llama 1 and 2, by vocabulary since."""
    weights = consolidated(4, 4, 8, 32, 96)
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = torch.cat([weights[name], weights[name][:3]])  # 64 rows
    rows, columns = ("wq.", "wk.", "wv.", "w1.", "w3.", "output."), ("wo.", "w2.")

    def part(name: str, value: Tensor, rank: int) -> Tensor:
        if name.startswith("tok_"):
            return value.chunk(ranks, axis)[rank].clone()
        cut = [at for at, names in enumerate((rows, columns)) if any(one in name for one in names)]
        return value.chunk(ranks, cut[0])[rank].clone() if cut else value

    for rank in range(ranks):
        parts = {name: part(name, value, rank) for name, value in weights.items()}
        folder(tmp_path, META, parts, f"consolidated.{rank:02}.pth")
    with torch.no_grad():
        expected = of_meta(weights, 4, 4, 8, TOKENS)
        torch.testing.assert_close(gf.load(tmp_path).model(TOKENS), expected, rtol=0, atol=2e-5)
    del parts["layers.1.attention.wo.weight"]
    torch.save(parts, tmp_path / f"consolidated.{ranks - 1:02}.pth")
    with refused(code="missing", field="tensor 'layers.1.attention.wo.weight'"):
        gf.load(tmp_path)
    torch.save(
        {**parts, "layers.1.attention.wo.weight": torch.ones(2, 2)}, tmp_path / f"consolidated.{ranks - 1:02}.pth"
    )
    with refused(code="conflict", field="tensor 'layers.1.attention.wo.weight'"):
        gf.load(tmp_path)


@pytest.mark.parametrize("name", ["tok_embeddings.weight", "layers.0.attention.wo.weight", "output.weight"])
def test_parts_without_an_axis_to_join_are_refused(name: str, tmp_path: Path) -> None:
    weights = consolidated(4, 4, 8, 32, 96)
    for rank in range(2):
        folder(tmp_path, META, {**weights, name: torch.tensor(1.0)}, f"consolidated.{rank:02}.pth")
    with refused(code="damaged", field=f"tensor '{name}'"):
        gf.load(tmp_path)


def test_tensors_shared_out_over_files_are_one_model(tmp_path: Path) -> None:
    """The form in which Mistral publishes large models."""
    weights, params = consolidated(4, 4, 8, 32, 96), {**META, "max_seq_len": 64}
    names = sorted(weights)
    for at in range(2):
        some = {name: weights[name] for name in names[at::2]}
        folder(tmp_path, params, some, f"consolidated-0000{at + 1}-of-00002.safetensors")
    with torch.no_grad():
        expected = of_meta(weights, 4, 4, 8, TOKENS)
        torch.testing.assert_close(gf.load(tmp_path).model(TOKENS), expected, rtol=0, atol=2e-5)
    folder(tmp_path, params, weights, "consolidated-00002-of-00002.safetensors")
    with refused(code="conflict", field=f"tensor {names[0]}"):
        gf.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "tekken.json"])
def test_a_tokenizer_that_is_not_read_is_named_with_the_way_to_one_that_is(name: str, tmp_path: Path) -> None:
    place = folder(tmp_path, {**META, "max_seq_len": 64}, consolidated(4, 4, 8, 32, 96))
    (place / name).write_bytes(b"x")
    with pytest.warns(UserWarning) as told:
        assert gf.load(place).tokenizer is None
    assert len(told) == 1 and "tokenizer.json next to it" in str(told[0].message)


# Folders of Hugging Face whose weights torch saved


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_with_weights_of_torch_is_the_same_model(name: str, shards: int, tmp_path: Path) -> None:
    """Tied weights are saved twice by torch, and masks of old versions with them."""
    sizes: dict[str, Any] = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    more = {"intermediate_size": 40, "tie_word_embeddings": True} if name == "llama" else {}
    config = transformers.AutoConfig.for_model(name, **sizes, **more)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path)
    weights = dict(theirs.state_dict())
    if name == "gpt2":
        weights |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
    if shards == 1:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        homes = {key: f"pytorch_model-0000{1 + at % 2}-of-00002.bin" for at, key in enumerate(weights)}
        for home in set(homes.values()):
            torch.save({key: weights[key] for key in homes if homes[key] == home}, tmp_path / home)
        index = {"metadata": {"total_size": 1}, "weight_map": homes}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        torch.testing.assert_close(gf.load(tmp_path).model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=2e-5)
    assert main(["inspect", str(tmp_path)]) == 0


@pytest.mark.parametrize(("held", "fetched"), [("model.safetensors", 1), ("pytorch_model.bin", 2)])
def test_torch_weights_are_fetched_only_without_others(
    held: str, fetched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Hub that holds one file of weights."""
    asked: list[list[str]] = []

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if any(fnmatch(held, pattern) for pattern in allow_patterns):
            (tmp_path / held).touch()
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert (checkpoints.locate("hf:owner/name") / held).exists() and len(asked) == fetched
    assert checkpoints.locate("hf:owner/name", weights=False) == tmp_path and asked[-1] == ["config.json"]


def test_code_in_weights_of_torch_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.GPT2Config(vocab_size=61, n_layer=1, n_head=2, n_embd=8).save_pretrained(tmp_path)
    hostile(tmp_path, Command(eval, "open('was-here', 'w')"), "pytorch_model.bin")
    with refused(code="unsupported", field="pytorch_model.bin:__builtin__.eval"):
        gf.load(tmp_path)
    assert not (tmp_path / "was-here").exists()


def test_packed_weights_are_kept_of_a_gguf_only(tmp_path: Path) -> None:
    for place in (checkpoint(tmp_path, nanogpt(True)), folder(tmp_path / "meta", META, consolidated(4, 4, 8, 32, 96))):
        with refused(code="unsupported", field="quantize"):
            gf.load(place, quantize="keep")


# Files of torch


class Command:
    def __init__(self, function: Any, *arguments: Any):
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def hostile(place: Path, value: Any, name: str = "ckpt.pt") -> Path:
    torch.save({"model_args": dict(ARGUMENTS), "model": nanogpt(True), "more": value}, place / name)
    return place / name


@pytest.mark.parametrize(
    ("value", "at"),
    [
        (Command(eval, "open('was-here', 'w')"), "__builtin__.eval"),
        (Command(exec, "open('was-here', 'w')"), "__builtin__.exec"),
        (Command(__import__("os").system, "touch was-here"), "posix.system"),
        (Command(getattr, "a", "upper"), "__builtin__.getattr"),
        (Path("x"), "pathlib.PosixPath"),
        (torch.device("cpu"), "torch.device"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.ones(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
        (OrderedDict.fromkeys, "__builtin__.getattr"),
    ],
)
def test_values_that_are_not_tensors_are_refused_by_name(
    value: Any, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = hostile(tmp_path, value)
    with refused(code="unsupported", field=f"ckpt.pt:{at}"):
        gf.load(path)
    assert main(["check", str(path)]) == 2
    assert not (tmp_path / "was-here").exists()


def archive(place: Path, pickled: bytes, storages: dict[str, bytes], **more: Any) -> Path:
    with zipfile.ZipFile(place / "x.pt", "w", **more) as file:
        file.writestr("x/data.pkl", pickled)
        for key, data in storages.items():
            file.writestr(f"x/data/{key}", data)
    return place / "x.pt"


def tensor(key: str = "0", count: int = 4, shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """Returns the instructions of a tensor, as torch writes them."""
    reference = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00" + key.encode()
    numbers = b"X\x03\x00\x00\x00cpu" + b"\x8a\x08" + count.to_bytes(8, "little") + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + reference + numbers + b"K\x00" + shape + stride + b"\x89}tR"


def one_tensor(**changes: Any) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + tensor(**changes) + b"s."


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    data = torch.arange(4.0).numpy().tobytes()
    with PickledFile(archive(tmp_path, one_tensor(), {"0": data})) as file:
        assert file.tensor("a").tolist() == [0.0, 1.0, 2.0, 3.0]


HUGE = b"\x8a\x08" + (1 << 59).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"count": 1 << 59}, "damaged"),
        ({"count": 3}, "damaged"),
        ({"shape": HUGE + b"\x85"}, "damaged"),
        ({"shape": HUGE + HUGE + b"\x86", "stride": HUGE + b"K\x01\x86"}, "damaged"),
        ({"shape": b"K\x05\x85"}, "damaged"),
        ({"shape": b"K\x02K\x02\x86", "stride": b"K\x01K\x02\x86"}, "unsupported"),
        ({"shape": b"J\xff\xff\xff\xff\x85"}, "unsupported"),
        ({"shape": b"K\x04\x85", "stride": b"K\x00\x85"}, "unsupported"),
        ({"key": "1"}, "damaged"),
    ],
)
def test_sizes_that_contradict_the_file_are_refused(change: dict[str, Any], code: Any, tmp_path: Path) -> None:
    path = archive(tmp_path, one_tensor(**change), {"0": bytes(16)})
    with pytest.raises(RequestError) as problem:
        PickledFile(path)
    assert problem.value.code == code and len(str(problem.value)) < 500


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, one_tensor(), {"0": bytes(16)}, compression=zipfile.ZIP_DEFLATED)
    with refused(code="damaged", field="x.pt:header"):
        PickledFile(path)


@pytest.mark.parametrize(
    "pickled",
    [
        b"", b".", b"\x80\x02", b"\x80\x02}", b"\x80\x02}R.", b"\x80\x02s.", b"\x80\x02t.", b"\x80\x02Q.", b"h\x00.",
        b"\x80\x02}}]s.", b"\x80\x02}(K\x01u.", b"\x80\x02]K\x01b.", b"\x80\x02K\x01\x85K\x01R.", b"cos\nsystem\n.",
        b"\x80\x02X\xff\xff\xff\xffa.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02ccollections\nOrderedDict\n.", b"\x80\x02" + b"]" * ((1 << 20) + 1) + b".", b"\x80\x02\x8a\xff.",
        b"I1\n.", b"\x80\x02}\x8a\x0a" + b"\x7f" * 10 + b"K\x01s.",
    ],
)  # fmt: skip
def test_invalid_pickles_are_refused(pickled: bytes, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as problem:
        PickledFile(archive(tmp_path, pickled, {}))
    assert problem.value.code in ("unsupported", "damaged") and "\n" not in str(problem.value)


def test_every_truncated_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(6.0), "b": [1, "c"]}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(RequestError):
            PickledFile(path)


def test_a_value_that_unfolds_without_end_is_not_shown(tmp_path: Path) -> None:
    """Twenty-six lists, each with the one before twice in it: their text has 67 million brackets."""
    nest: Any = []
    for _ in range(26):
        nest = [nest, nest]
    with refused(code="missing", field="model_args.n_head"):
        gf.load(checkpoint(tmp_path, nanogpt(True), n_head=nest))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back(protocol: int) -> None:
    value = {"a": [1, 2.5, None, True, (1, 2, 3, 4), -70_000, 1 << 40], "ä": {3: "x" * 300, "e": ()}, "self": [[]]}
    assert value_of(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.arange(24).reshape(4, 6).to(dtype)
    saved = {
        "whole": base,
        "rows": base[1:3],
        "none": base[:0],
        "one": base[0, 1],
        "of": torch.nn.Parameter(base, False),
    }
    torch.save(OrderedDict(saved), tmp_path / "x.pt")
    with PickledFile(tmp_path / "x.pt") as file:
        for name, value in saved.items():
            assert torch.equal(file.tensor(name), value.detach()), name
