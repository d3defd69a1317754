"""Parts that a user wrote in one file (`toy_parts.py`) serve everything that the package's own parts do."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison import compare
from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.laboratory.experiments import steps_of
from glassformer.laboratory.proof import check
from glassformer.lens import inspect
from glassformer.naming import parse, resize, words
from glassformer.parts.core import outside
from glassformer.parts.core.base import part_classes
from glassformer.parts.core.outside import import_modules, modules_of
from glassformer.parts.counted import Counting
from glassformer.parts.mixer import Mixer, MixerConfig
from glassformer.runs.arm import measure
from glassformer.runs.events import silent
from glassformer.text import Batch
from tests.plugin import toy_parts, uncounted_parts  # noqa: F401  # its kinds become known
from tests.refused import refused

TINY = "layers=2+d_model=32+heads=4"
TOY = f"llama@1m+{TINY}+ema+l1norm+sine"
PLAN: dict[str, Any] = {"tokens": 6 * 4 * 32, "batch_size": 4, "context": 32, "threads": 1, "dtype": "float32"}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


def test_its_words_are_in_the_grammar():
    listed = {str(word) for some in words().values() for word in some}
    assert {"ema[:4]", "l1norm", "sine"} <= listed
    block = gf.preset("gpt2@1m+ema:9+l1norm+sine").stack[0].blocks[0]
    assert (block.mixer, block.norm.kind, block.ffn and block.ffn.kind) == (
        toy_parts.EmaConfig(half_life=9),
        "l1",
        "sine",
    )
    assert gf.preset("gpt2@1m+ema").embedding.position is None  # it tells the order by itself
    assert parse("llama@10m+ema:2")[2] == ["ema:2"]


def test_a_change_that_a_mixer_does_not_have_is_refused_or_passes_it_by():
    with pytest.raises(RequestError) as caught:
        gf.preset("llama@1m+ema+window:16")
    assert caught.value.code == "unsupported"
    assert gf.preset("llama@1m+ema+dropout:0.1+nobias").stack[0].blocks[0].mixer == toy_parts.EmaConfig()


def test_experts_of_an_ffn_without_expert_support_are_refused():
    with refused(code="unsupported", field="ffn.kind"):
        gf.preset("llama@1m+sine+moe:4:2")


def test_it_is_resized_and_keeps_the_weights_of_the_other_ffn():
    config = resize(gf.preset(TOY), "3m")
    assert config.d_model == 256 and config.stack[0].blocks[0].mixer == toy_parts.EmaConfig()
    assert config.build().layers[0].mixer.decay.shape == (256,)  # type: ignore[union-attr]
    gated, plain = (gf.preset(f"llama@1m+{one}").num_params() for one in ("hidden=96", "hidden=96+sine"))
    assert gated == plain  # three matrices of 96, two of 144


def test_plugin_model_is_trained_saved_loaded_and_resumed(source: Path, tmp_path: Path):
    recipe = {"tokens": 256, "batch_size": 2, "context": 16, "threads": 1, "dtype": "float32", "device": "cpu"}
    run = gf.train(gf.preset(TOY), source, recipe, out=tmp_path / "run")
    assert run.status == "ok"
    loaded = gf.load(tmp_path / "run")
    model, tokens = loaded.model.eval(), torch.randint(20, (1, 9))
    gf.save(model, loaded.tokenizer, tmp_path / "saved")
    again = gf.load(tmp_path / "saved")
    assert again.config.stack == model.config.stack
    torch.testing.assert_close(again.model(tokens), model(tokens))
    report = check(tmp_path / "saved")
    assert {row.verdict for row in report.rows} <= {"ok", "skipped"}, str(report)
    assert any(row.site == "padded and cached" and row.verdict == "ok" for row in report.rows)


def test_plugin_model_generates_as_its_full_pass():
    model = gf.preset(TOY).build(seed=0).eval()
    tokens = torch.randint(256, (2, 5), generator=torch.Generator().manual_seed(0))
    text = gf.generate(model, tokens, max_new_tokens=6, temperature=0.0)
    for at in range(5, 11):
        assert torch.equal(model(text[:, :at])[:, -1].argmax(-1), text[:, at])


def test_it_is_looked_into_and_planned():
    config = gf.preset(TOY)
    model, tokens = config.build(seed=0).eval(), torch.arange(1, 9)[None]
    seen = gf.capture(model, tokens, ["layers.*.mixer.z", "layers.0.ffn.hidden"])
    assert seen["layers.1.mixer.z"].shape == (1, 8, 32)
    plain = model(tokens)
    with gf.edit(model, {"layers.0.mixer.z": torch.zeros_like}):
        assert not torch.equal(model(tokens), plain)
    page = inspect(model, tokens)
    assert not page.heads and page.causal and page.mean_loss > 0
    cost = gf.plan(config, context=64)
    assert cost.state_bytes == config.state_bytes(64, torch.bfloat16) == 2 * 32 * 4  # one size whatever the context


def test_plugin_model_is_compared_in_separate_processes(source: Path, tmp_path: Path):
    results = compare([f"llama@1m+{TINY}", TOY], source, out=tmp_path / "out", allow_unmatched=True, **PLAN)
    assert [run.status for run in results.runs] == ["ok", "ok"], [run.error for run in results.runs]


def test_a_part_of_a_script_or_notebook_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(toy_parts.EmaConfig, "__module__", "__main__")
    with pytest.raises(RequestError) as caught:
        compare([TOY], source, out=tmp_path / "out", **PLAN)
    assert (caught.value.code, caught.value.value) == ("unsupported", "EmaConfig")
    assert not (tmp_path / "out").exists()


def test_the_modules_of_a_config_are_named_with_their_folder():
    assert modules_of(part_classes(gf.preset("llama@1m"))) == {}
    root = Path(__file__).parents[2]
    assert modules_of(part_classes(gf.preset(TOY))) == {"tests.plugin.toy_parts": str(root)}


def test_a_module_that_is_gone_is_named(tmp_path: Path):
    with refused(code="missing", field="part") as caught:
        import_modules({"no_such_parts": str(tmp_path)})
    assert caught.value.value == "no_such_parts"
    sys.path.remove(str(tmp_path))


def test_unknown_kind_is_refused_with_a_hint_to_import():
    tree = gf.preset("llama@1m").to_dict()
    tree["final_norm"]["kind"] = "l7"
    with refused(code="unknown", field="final_norm"):
        ModelConfig.from_dict(tree)


# Installed


def installed(place: Path, module: str = "toy_package") -> dict[str, str]:
    """The environment of a process in which a package with the toy parts is installed."""
    (place / "toy_package.py").write_text(Path(toy_parts.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    info = place / "toy_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[glassformer.parts]\ntoy = {module}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(gf.__file__).parents[1]), str(place)])}


def test_an_installed_package_offers_its_parts(tmp_path: Path):
    """To a word, to a file, and to the command line; nothing is imported for models that do without."""
    environment = installed(tmp_path)
    gf.preset("llama@1m+l1norm").save(tmp_path / "model.yaml")
    code = """
import sys
import glassformer as gf
gf.preset("llama@1m+rope")
print("toy_package" in sys.modules, gf.ModelConfig.from_file(sys.argv[1]).final_norm.kind)
print(repr(gf.preset("gpt2@1m+ema:3")))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout.startswith("False l1\n") and "EmaConfig(half_life=3)" in done.stdout, done.stderr
    command = [sys.executable, "-m", "glassformer", "plan", "llama@1m+ema+sine", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_an_installed_package_that_is_broken_is_named(tmp_path: Path):
    environment = installed(tmp_path, "no_such_module")
    command = [sys.executable, "-m", "glassformer", "plan", "llama@1m+ema"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 2 and "toy-package offers parts in no_such_module" in done.stderr


# What does not answer cannot be built


def test_mixer_config_without_abstract_method_is_refused_at_definition():
    with pytest.raises(TypeError, match="must define") as caught:

        class SilentConfig(MixerConfig, kind="silent"):
            pass

    asked = {"causal", "changed", "check_training", "heads", "keys_seen", "reach", "resized"}
    assert asked <= set(str(caught.value).partition("must define ")[2].split(", "))
    assert "silent" not in MixerConfig.choices()


def test_a_mixer_that_does_not_answer_cannot_be_made():
    class Silent(Mixer):
        def forward(self, x: torch.Tensor, pass_: Any = None, state: Any = None) -> torch.Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    with pytest.raises(TypeError, match="abstract"):
        Silent()  # type: ignore[abstract]


def test_a_mixer_that_sees_ahead_is_neither_trained_nor_decoded(source: Path, monkeypatch: pytest.MonkeyPatch):
    """By its own answer, without a visibility to ask."""
    monkeypatch.setattr(toy_parts.EmaConfig, "causal", lambda self, ctx: False)
    monkeypatch.setattr(toy_parts.Ema, "causal", False)
    config = gf.preset(TOY)
    assert not config.causal
    with pytest.raises(RequestError) as caught:
        gf.train(config, source, {"tokens": 256, "batch_size": 2, "context": 16})
    assert caught.value.code == "causal"
    model: nn.Module = config.build().eval()
    with pytest.raises(RequestError) as caught:
        gf.generate(model, torch.ones(1, 3, dtype=torch.long), max_new_tokens=1)  # type: ignore[arg-type]
    assert caught.value.code == "causal"


# Counts of a user's part, against the module that it builds

SMALL = f"llama@1m+{TINY}+vocab_size=50"
D, T = 32, 16
PRODUCTS = 4 * 2 * T * D * D + 2 * 2 * T * T * D
"""FLOPs of attention on T tokens: four maps of d x d, and queries against keys and patterns against values."""
UNCOUNTED = [
    ("+mixer.kind=wider_attention", "layers.0.mixer", 4 * D * D + 32 * D * D, 4 * D * D),
    ("+norm.kind=scaled_norm", "layers.0.mixer_norm", D + 1, D),
    ("+mixer.kind=twice_attention", "layers.0.mixer", PRODUCTS + 2 * T * D * D, PRODUCTS),
    ("+ema+mixer.kind=two_emas", "layers.0.mixer", 2 * 4 * D, 4 * D),
]


@pytest.mark.parametrize(("change", "site", "built", "counted"), UNCOUNTED, ids=lambda one: str(one)[1:])
def test_a_part_that_does_more_than_it_counts_is_refused_with_both_figures(
    change: str, site: str, built: int, counted: int
) -> None:
    with refused(code="conflict", field=site) as caught:
        gf.preset(SMALL + change).flops(T)
    assert caught.value.value == built and caught.value.expected.startswith(f"{counted:,} ")


def test_no_verb_takes_a_count_that_is_wrong(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nor a config that was made by hand, which nothing has checked before."""
    tree = gf.preset(SMALL).to_dict()
    tree["stack"][0]["blocks"][0]["mixer"]["kind"] = "wider_attention"
    config = ModelConfig.from_dict(tree)
    budget: dict[str, Any] = {"steps": 2, "batch_size": 2, "context": 16, "out": tmp_path / "out"}
    asked: list[Callable[[], object]] = [
        config.num_params,
        config.build,
        lambda: gf.plan(config),
        lambda: gf.inspect(config).to_dict(),
        lambda: gf.train(config, source, **budget),
        lambda: gf.compare([SMALL, config], source, **budget),
        lambda: gf.compare([SMALL, config], source, **budget | {"match": "flops"}),
    ]
    for ask in asked:
        with refused(code="conflict", field="layers.0.mixer"):
            ask()
    assert not (tmp_path / "out").exists()


def test_a_model_of_the_package_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch):
    """The check costs a forward pass."""
    checked: list[str] = []
    for name in ("check_tensors", "check_flops"):
        monkeypatch.setattr(Counting, name, lambda self, name=name: checked.append(name))
    gf.preset(SMALL).flops(16)
    assert not checked
    config = gf.preset(f"{SMALL}+l1norm")
    config.build()
    assert checked == ["check_tensors"]  # a name is answered without a forward pass
    assert config.flops(16) == config.flops(16)
    assert sorted(checked) == ["check_flops", "check_tensors"]


def test_a_part_that_asks_for_values_is_counted(monkeypatch: pytest.MonkeyPatch):
    def forward(self: toy_parts.Sine, x: torch.Tensor, pass_: Any = None) -> torch.Tensor:
        return self.down_proj(torch.sin(self.up_proj(x))) if x.max().item() < 9 else x

    monkeypatch.setattr(toy_parts.Sine, "forward", forward)
    assert gf.preset(f"{SMALL}+sine").num_params()


def test_a_large_model_is_counted_without_allocating_it():
    """69 billion parameters are more than a machine of the tests has."""
    assert gf.preset("llama-2-70b+sine").num_params() == gf.preset("llama-2-70b+gelu").num_params()
    with refused(code="conflict", field="layers.0.mixer"):
        gf.preset("llama-2-70b+mixer.kind=wider_attention")


# Imported by a verb


def test_every_verb_imports_the_parts_that_it_is_given(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = tmp_path / "waves_of_mine.py"
    text = Path(toy_parts.__file__).read_text(encoding="utf-8")
    for old, new in (("Ema", "Fade"), ("L1Norm", "Flat"), ("Sine", "Wave")):
        text = text.replace(old, new).replace(f'"{old.lower()}"', f'"{new.lower()}"')
    mine.write_text(text.replace('"l1"', '"flatnorm"'), encoding="utf-8")
    assert main(["plan", "llama@1m+wave", "--import", str(mine), "--json"]) == 0
    capsys.readouterr()


FACTOR = """
import torch
from glassformer.parts.norm import RMSNorm, RMSNormConfig

class {name}(RMSNorm):
    def forward(self, x):
        return {factor} * super().forward(x)

class {name}Config(RMSNormConfig, kind="{name}", words="{name}"):
    def build(self, ctx):
        return {name}(ctx.width or ctx.d_model, self.eps)
"""
"""Source of a norm whose output is some factor larger."""


def own_norm(name: str, folder: Path, factor: float = 2) -> Path:
    file = folder / f"{name}.py"
    file.write_text(FACTOR.format(name=name, factor=factor), encoding="utf-8")
    return file


def typed(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The end of a command in a process that knows no part from outside the package."""
    command = [sys.executable, "-m", "glassformer", *command]
    environment = {**os.environ, "GLASSFORMER_CACHE": str(folder / "cache")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment, check=False
    )


@pytest.mark.slow
def test_results_keep_source_and_command_of_an_imported_part(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison from the command line trains the part in its subprocess; the hash is that of hashlib. The command of
    one that Python started, on ids in memory, adds a seed to it; with another source of the part, nothing is added."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    file = own_norm("louder", tmp_path)
    models = [f"llama@1m+{TINY}", f"llama@1m+{TINY}+louder"]
    plan = ["--steps", "2", "--batch-size", "2", "--context", "16", "--threads", "1"]
    done = typed(["compare", *models, "--data", str(source), "--import", "louder.py", "--out", "a", *plan], tmp_path)
    assert done.returncode == 0, done.stderr
    outside.import_files([str(file)])
    options: dict[str, Any] = {"steps": 2, "batch_size": 2, "context": 16, "threads": 1, "out": "b", "progress": False}
    gf.compare(models, list(range(50)) * 40, **options)
    hashed = hashlib.sha256(file.read_bytes()).hexdigest()
    for name in ("a", "b"):
        results = json.loads(Path(name, "results.json").read_text())
        plain, mine = results["runs"]
        assert (plain["status"], mine["status"]) == ("ok", "ok"), mine["error"]
        assert (plain["sources"], mine["sources"]) == ({}, {"louder": {"file": str(file), "sha256": hashed}})
    assert results["command"] == f"glassformer run b/design.yaml --import {file}"
    done = typed([*shlex.split(results["command"])[1:], "--seeds", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(Path("b/results.json").read_text())["runs"]) == 4
    own_norm("louder", tmp_path, 3)
    monkeypatch.delitem(sys.modules, "louder")
    outside.import_files([str(file)])
    with refused(code="changed", field="part"):
        gf.compare(models, list(range(50)) * 40, seeds=3, **options)


def test_a_run_is_resumed_with_its_source_only(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    outside.import_files([str(own_norm("quieter", tmp_path, 0.5))])
    plan: dict[str, Any] = {"steps": 2, "batch_size": 2, "context": 16, "threads": 1}
    out = tmp_path / "run"
    gf.train(f"llama@1m+{TINY}+quieter", source, out=out, **plan)
    gf.train(f"llama@1m+{TINY}+quieter", source, out=out, resume=True, **plan)
    monkeypatch.setitem(outside.SOURCES, "quieter", {"file": "quieter.py", "sha256": "0" * 64})
    with refused(code="changed", field="part"):
        gf.train(f"llama@1m+{TINY}+quieter", source, out=out, resume=True, **plan)
    (out / "sources.json").write_text("[]")
    with refused(code="damaged", field="sources.json"):
        gf.train(f"llama@1m+{TINY}+quieter", source, out=out, resume=True, **plan)


def test_a_process_with_another_source_trains_nothing() -> None:
    """A file that is edited while runs are trained."""
    outside.check_sources({module: source["sha256"] for module, source in outside.SOURCES.items()}, "the start")
    with refused(code="changed", field="part"):
        measure(Path(), {"sources": {toy_parts.__name__: "0" * 64}}, silent)


def test_a_file_of_a_package_is_imported_by_its_name_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("")
    outside.import_files([str(own_norm("deeper", inner))])
    assert modules_of(part_classes(gf.preset(f"llama@1m+{TINY}+deeper"))) == {"outer.inner.deeper": str(tmp_path)}


@pytest.mark.parametrize("path", ["", "no_such_file.py", "words.txt"])
def test_an_import_of_no_file_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("words")
    with refused(code="missing", field="import"):
        outside.import_files([path])
    assert main(["plan", "llama@1m", "--import", path]) == 2


@pytest.fixture(scope="module")
def own_parts() -> Iterator[None]:
    """The parts of docs/own-parts.md, which tests/test_docs.py holds to their files."""
    path = [*sys.path]
    outside.import_files(map(str, sorted((Path(__file__).parents[2] / "examples" / "parts").glob("*.py"))))
    yield
    sys.path[:] = path


def test_the_attention_of_the_page_is_attention_at_temperature_one(own_parts: None) -> None:
    """Doubled, the temperature doubles the scores."""
    for model in ("llama@0.3m+gqa:1", "gpt2@0.3m", "llama@0.3m+window:4"):
        plain, mine = gf.preset(f"{model}+kernel=naive"), gf.preset(f"{model}+kernel=naive+temperature")
        assert mine.num_params() - plain.num_params() == sum(block.mixer.n_heads for block in plain.layers())  # type: ignore[attr-defined]
        assert mine.flops(16) == plain.flops(16)
        tokens, a, b = torch.arange(1, 9)[None], plain.build(seed=0).eval(), mine.build(seed=0).eval()
        torch.testing.assert_close(b(tokens), a(tokens))
        b.layers[0].mixer.log_temperature.data.fill_(torch.log(torch.tensor(2.0)))  # type: ignore[union-attr, operator]
        scores = [gf.capture(model, tokens, "layers.0.mixer.scores")["layers.0.mixer.scores"] for model in (a, b)]
        seen = scores[0].isfinite()
        torch.testing.assert_close(scores[1][seen], 2 * scores[0][seen])


OF_THE_PAGE = [
    ("gelu", "+snake", 0),
    ("rmsnorm", "+maxnorm", 0),
    ("mha", "+running_mean", -2 * 3 * 32 * 32),
    ("mha", "+temperature", 2 * 4),
]  # fmt: skip


@pytest.mark.parametrize(("instead", "change", "more"), OF_THE_PAGE, ids=lambda one: str(one))
def test_counts_of_the_page_are_those_of_the_built_modules(instead: str, change: str, more: int, own_parts: None):
    """Parameters by hand against a model of the package; FLOPs by torch's counter, which `flops` asks."""
    plain, mine = gf.preset(f"{SMALL}+{instead}"), gf.preset(SMALL + change)
    model = mine.build(seed=0)
    assert sum(weight.numel() for weight in model.parameters()) == mine.num_params() == plain.num_params() + more
    assert mine.flops(T) > 0


def test_functions_of_the_page_are_their_formulas(own_parts: None) -> None:
    model = gf.preset(f"{SMALL}+snake+maxnorm+running_mean").build(seed=0).eval()
    mixer, norm, ffn = (model.get_submodule(f"layers.0.{name}") for name in ("mixer", "residual.mixer_norm", "ffn"))
    x = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x).abs().amax(-1), torch.ones(2, 7), atol=1e-4, rtol=0)
    mean = x.cumsum(1) / torch.arange(1, 8)[:, None]
    torch.testing.assert_close(mixer(x), mean @ mixer.output.weight.T)
    h = x @ ffn.up.weight.T
    torch.testing.assert_close(ffn(x), (h + (1 - torch.cos(2 * h)) / 2) @ ffn.down.weight.T)
    text = gf.generate(model, torch.arange(5)[None], max_new_tokens=6, temperature=0.0)
    for at in range(5, 11):
        assert torch.equal(model(text[:, :at])[:, -1].argmax(-1), text[:, at])
    packed = model(torch.tensor([[1, 2, 3, 4, 5]]), documents=torch.tensor([[0, 0, 1, 1, 1]]))
    torch.testing.assert_close(packed[:, 2:], model(torch.tensor([[3, 4, 5]])))


def test_optimizer_and_objective_of_the_page_by_hand(own_parts: None) -> None:
    recipe = gf.Recipe(steps=1, optimizer="sign_descent", objective="smoothed:0.2")  # type: ignore[arg-type]
    model = gf.preset(SMALL).build(seed=0)
    batch = Batch(torch.arange(8)[None], torch.arange(1, 9)[None])
    logs = model(batch.inputs).log_softmax(-1)
    nll = -logs.gather(-1, batch.targets[..., None]).mean()
    loss = recipe.objective.loss(model, batch)
    torch.testing.assert_close(loss, 0.8 * nll - 0.2 * logs.mean())
    torch.testing.assert_close(recipe.objective.loss(model, batch, "none").mean(), nll)  # held out
    loss.backward()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    recipe.optimizer.create(model, 0.01, 0.3).step()
    decay = 0.3 / 0.3  # its rate is 0.3 of AdamW's, so its decay is 1 / 0.3 of the recipe's
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        kept = 1 - 0.01 * decay * (weight.dim() > 1 and "embed" not in name)
        torch.testing.assert_close(weight.detach(), kept * before[name] - 0.01 * weight.grad.sign(), msg=name)


@pytest.mark.slow
def test_parts_of_the_page_are_trained_in_a_process_that_imports_them(
    source: Path, tmp_path: Path, own_parts: None
) -> None:
    """The optimizer and the objective, which only the recipe names, too."""
    models = [f"llama@1m+{TINY}+snake+maxnorm+temperature", f"llama@1m+{TINY}+running_mean"]
    options: dict[str, Any] = {"optimizer": "sign_descent", "objective": "smoothed:0.2", "allow_unmatched": True}
    found = gf.compare(models, source, out=tmp_path / "out", progress=False, **options, **PLAN)
    assert [run.status for run in found.runs] == ["ok", "ok"], [run.error for run in found.runs]
    kept = {name for run in found.runs for name in run.sources}
    assert kept == {"snake", "max_norm", "temperature", "running_mean", "sign_descent", "smoothed"}
    assert all(f"{name}.py" in found.results.command for name in kept)


def test_a_parameter_that_nothing_fills_is_refused_before_training(source: Path, tmp_path: Path):
    own = f"llama@1m+{TINY}+mixer.kind=unfilled_attention"
    with refused(code="missing", field="layers.0.mixer.heat"):
        gf.compare([f"llama@1m+{TINY}", own], source, out=tmp_path / "out", progress=False, **PLAN)
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize("kind", ["config", "design"])
def test_a_folder_whose_parts_are_not_imported_names_the_option(kind: str, tmp_path: Path) -> None:
    """The file that it names is never imported."""
    read = {"config": lambda: gf.ModelConfig.from_file(tmp_path / "config.yaml"), "design": lambda: steps_of(design)}
    design = tmp_path / "design.yaml"
    design.write_text("schema: 1\nverb: compare\nmodels: [llama@1m+unseen]\ndata: python-docs\ntokens: 1000\n")
    gf.preset("llama@1m").save(tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("kind: rmsnorm", "kind: unseen"))
    for held, named in (('{"unseen": {"file": "/x/unseen.py", "sha256": ""}}', True), ("[1]", False), ("{", False)):
        (tmp_path / "sources.json").write_text(held)
        with pytest.raises(gf.RequestError) as caught:
            read[kind]()
        assert ("--import /x/unseen.py" in str(caught.value)) == named and "unseen" in str(caught.value)
