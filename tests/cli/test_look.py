"""`glassformer inspect EXPR --text`: what is read, what is printed, what is written."""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer import lens
from glassformer.cli import app, main
from glassformer.cli.options import text_of
from glassformer.cli.show import call_and_show
from glassformer.errors import RequestError
from glassformer.laboratory import inspection
from glassformer.lens.inspection import inspect
from glassformer.lens.registry import READINGS
from glassformer.lens.terminal import HEADED
from glassformer.naming.loading import load
from glassformer.runs import live
from tests.cli.conftest import saved
from tests.refused import refused

TEXT = "the cat sat on the mat, the cat sat on"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def show_inspection(name: str, text: str, out: str | None = None, as_json: bool = False, **options: Any) -> None:
    folder = out if out is not None or as_json else "inspection"
    call_and_show(gf.inspect, name, text_of(text, "text"), out=folder, as_json=as_json, **options)


def read(capsys: pytest.CaptureFixture[str], name: str, text: str, out: str | None = None) -> dict[str, Any]:
    show_inspection(name, text, out, as_json=True)
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_a_reading_and_its_page(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    show_inspection(model, TEXT)
    out = capsys.readouterr().out
    for words in ("38 tokens", "nats per token", "most surprising:", "notable heads", "attends to",
                  "what each depth would say after ‘n’", "embedding", "layer 1"):  # fmt: skip
        assert words in out
    assert TEXT in out.replace("\n", "")
    page = tmp_path / "inspection" / "inspect.html"
    assert out.splitlines()[-1].startswith("page: inspection/inspect.html (")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_folder_is_chosen(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    show_inspection(model, TEXT, out="a/b")
    assert (tmp_path / "a/b/inspect.html").is_file() and not (tmp_path / "inspection").exists()


@pytest.mark.parametrize("asked", [["--text", TEXT], ["--coord-check"]])
def test_an_empty_folder_is_refused(model: str, asked: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", model, *asked, "--out", ""]) == 2
    assert "out is empty; give a folder" in capsys.readouterr().err


def test_json(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = read(capsys, model, TEXT)
    loaded = load(model)
    seen = inspect(loaded.model, loaded.tokenizer.encode(TEXT), loaded.tokenizer, name=model)  # type: ignore[union-attr,arg-type]
    expected = json.loads(json.dumps(seen.to_dict()))
    assert found["page"] is None and list(tmp_path.iterdir()) == []
    assert found["words"] == list(TEXT) and len(found["heads"]) == 8 and found["trained"] is True
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found.keys() == expected.keys()
    with torch.no_grad():
        logits = loaded.model(torch.tensor(loaded.tokenizer.encode(TEXT)).long()[None])[0]  # type: ignore[union-attr]
    last = found["lens"]["predictions"][-1]
    assert [one["id"] for one in last] == logits[-1].topk(5).indices.tolist()
    assert read(capsys, model, TEXT, "here")["page"] == "here/inspect.html"


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_where_the_text_comes_from(
    how: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    found = read(capsys, model, {"file": "@text.txt", "stdin": "-"}[how])
    assert "".join(found["words"]) == TEXT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "text is empty"),
        ("@missing.txt", "--text @missing.txt cannot be read"),
        ("@.", "cannot be read"),
        ("@a\x00b", "cannot be read"),
        ("@latin.txt", "is not utf-8 text: it holds the byte 0xe9"),
        ("a\ud800", "surrogate"),
    ],
)
def test_text_that_cannot_be_read(text: str, says: str, model: str, tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(RequestError) as caught:
        show_inspection(model, text, as_json=True)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_longer_than_the_context_is_cut(learned: str, capsys: pytest.CaptureFixture[str]):
    show_inspection(learned, TEXT * 3, as_json=False)
    out, err = capsys.readouterr()
    assert "40 tokens" in out
    assert "the first 40 of 114 tokens are read" in " ".join(err.split()) and "context of 40" in " ".join(err.split())


def test_a_text_longer_than_the_page_is_cut(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inspection, "LONGEST", 10)
    assert read(capsys, model, TEXT)["tokens"] == 10


def test_progress_without_a_terminal(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Progress is printed at three depths; the clock starts with the first."""
    show_inspection(model, TEXT)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(live, "PATIENCE", 0.0)
    monkeypatch.setattr(live, "FIRST", 0.0)
    show_inspection(model, TEXT)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("reading: ")]
    assert [line.partition(",")[0] for line in lines] == ["reading: 33%", "reading: 67%", "reading: 100%"]
    assert all(line.endswith(" left") for line in lines[:2])
    assert read(capsys, model, TEXT)["tokens"] == len(TEXT)


def test_an_expression_has_random_weights_and_reads_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    expression = "llama@1m+layers=2+d_model=32+heads=4+vocab_size=256"
    show_inspection(expression, "é!")
    out, err = capsys.readouterr()
    assert "random weights" in out and "3 tokens" in out and "its weights are random" in " ".join(err.split())
    assert "Not trained." in (tmp_path / "inspection/inspect.html").read_text(encoding="utf-8")
    assert read(capsys, expression, "ab")["trained"] is False
    with refused(code="range", field="vocab_size"):
        show_inspection("llama@1m+vocab_size=65", "ab")


def test_changes_to_a_checkpoint(model: str, capsys: pytest.CaptureFixture[str]):
    found = read(capsys, f"{model}+window:3", TEXT)
    assert found["trained"] is True
    sinks = [head["sink_mass"] for head in found["heads"]]
    assert max(sinks) <= 3 / len(TEXT)


def test_tokens_do_not_speak_to_the_terminal(model: str, capsys: pytest.CaptureFixture[str]):
    show_inspection(model, "a\x1b[31m\x07\u202eb [bold]c[/bold] [/] \n\t")
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\u202e", "\t"}
    assert "[bold]c[/bold]" in out and "⟨U+001B⟩" in out


def test_one_token(model: str, capsys: pytest.CaptureFixture[str]):
    show_inspection(model, "a")
    assert "1 token\n" in capsys.readouterr().out
    assert read(capsys, model, "a")["loss"] is None


def test_unwritable_place_is_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(inspection, "lens_inspect", lambda *_, **__: pytest.fail("the text was read"))
    with refused(code="exists", field="out"):
        show_inspection("llama@1m", "words", out=str(tmp_path / "file"))


# Ablation


@pytest.mark.parametrize(
    ("named", "edits"),
    [
        (["layers.1.heads.0,2"], [lens.ablate_heads(1, [0, 2])]),
        (["layers.0.mixer", "layers.1.neurons.3"], [lens.ablate_mixer(0), lens.ablate_neurons(1, [3])]),
        (["layers.1", "layers.0.ffn"], [lens.ablate_layer(1), lens.ablate_ffn(0)]),
        (["layers.0.heads.1", "layers.0.heads.2"], [lens.ablate_heads(0, [1]), lens.ablate_heads(0, [2])]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value[0], str) else "",
)
def test_named_parts_are_ablated(
    model: str, named: list[str], edits: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for one in named for word in ("--ablate", one)]
    assert main(["inspect", model, "--text", TEXT, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    loaded = gf.load(model)
    tokens = torch.tensor([loaded.tokenizer.encode(TEXT).tolist()])
    with torch.no_grad(), ExitStack() as edited:
        for one in edits:
            edited.enter_context(gf.edit(loaded.model, one))
        loss = F.cross_entropy(loaded.model(tokens)[0, :-1].double(), tokens[0, 1:])
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert abs(found["loss"] - read(capsys, model, TEXT)["loss"]) > 1e-3
    assert found["name"].endswith(f" without {', '.join(named)}")


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("heads.1", "use layers.2, layers.2.mixer"),
        ("layers.1.heads", "use layers.2, layers.2.mixer"),
        ("layers.9.ffn", "layer 9 is out of range"),
        ("layers.0.heads.9", "head 9"),
        ("layers.0.experts.0", "no site is named"),
    ],
)
def test_unknown_parts_to_ablate_are_refused(
    model: str, named: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", model, "--text", TEXT, "--ablate", named]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["inspect", model, "--ablate", named]) == 2
    assert "ablate is for text" in capsys.readouterr().err


def test_second_model_in_place_of_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gpt2@1m", "llama@1m", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "text"


# More readings


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model") / "mixture", "llama+moe:4:2")


@pytest.mark.filterwarnings("error:Glyph")
def test_every_reading_is_printed_and_drawn(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A dense model of bytes has no experts, and no names of one token; the other readings are drawn."""
    assert main(["inspect", model, "--text", TEXT, "--reading", "all", "--out", "seen"]) == 0
    out = capsys.readouterr().out
    missing = {"expert_routing": "no layer of this model has experts", "activation_patching": "this tokenizer reads 0"}
    drawn = READINGS.keys() - missing.keys()
    assert {path.stem for path in (tmp_path / "seen").glob("*.png")} == drawn and len(drawn) == 12
    for name in drawn:
        assert f"\n{name}: " in out and f"figure: seen/{name}.png" in out
        assert (tmp_path / "seen" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for name, why in missing.items():
        assert f"\n{name}: {why}" in out
    assert "induction " in out and "depth 1 " in out and out.splitlines()[-1].startswith("page: seen/inspect.html")


def test_readings_as_json_are_those_of_the_library(model: str, mixture: str, capsys: pytest.CaptureFixture[str]):
    def asked(name: str, *readings: str) -> dict[str, Any]:
        show_inspection(name, TEXT, as_json=True, reading=readings)
        return json.loads(capsys.readouterr().out)["readings"]

    loaded = load(model)
    tokens = torch.tensor([loaded.tokenizer.encode(TEXT).tolist()])  # type: ignore[union-attr]
    found = asked(model, "attention_sinks", "head_ablation", "attention_sinks", "expert_routing")
    assert list(found) == ["attention_sinks", "head_ablation", "expert_routing"]
    assert list(found["expert_routing"]) == ["error"]
    mass = lens.attention_sinks(loaded.model, tokens).mass
    torch.testing.assert_close(torch.tensor(found["attention_sinks"]["mass"], dtype=mass.dtype), mass)
    with torch.no_grad():
        whole = loaded.model.loss(tokens[:, :-1], tokens[:, 1:])
    assert found["head_ablation"]["base"] == pytest.approx(float(whole), rel=1e-5)
    routed = asked(mixture, "expert_routing")["expert_routing"]
    assert len(routed["weights"]) == len(TEXT) and len(routed["load"][0]) == 4


def test_patching_one_text_into_another(model: str, capsys: pytest.CaptureFixture[str]):
    """The metric is the lead of what follows the first text over what follows the second."""
    texts = ["abcdefgh", "abcdefgz"]
    given = {"reading": ["activation_patching"]}
    show_inspection(model, texts[0], as_json=True, against=texts[1], **given)
    found = json.loads(capsys.readouterr().out)["readings"]["activation_patching"]
    loaded = load(model)
    with torch.no_grad():
        last = [loaded.model(torch.tensor([list(text.encode())]))[0, -1] for text in texts]
    right, other = (int(logits.argmax()) for logits in last)
    assert right != other
    for name, logits in zip(("clean", "corrupt"), last, strict=True):
        assert found[name] == pytest.approx(float(logits[right] - logits[other]), rel=1e-4)
    assert found["labels"] == list(texts[0]) and len(found["grids"]["resid_pre"]) == 2
    assert found["grids"]["resid_pre"][0] == pytest.approx([0.0] * 7 + [1.0], abs=1e-5)
    with refused(code="conflict", field="reading"):
        show_inspection(model, texts[0], as_json=True, against=texts[0], **given)
    with refused(code="conflict", field="reading"):
        show_inspection(model, texts[0], as_json=True, against="abc", **given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", TEXT, "--reading", "head_score"], "no reading is named 'head_score'; did you mean 'head_scores'"),
        (["--text", TEXT, "--reading", "?"], "there are attention_rollout,"),
        (["--reading", "head_scores"], "reading is for text"),
        (["--against", "a"], "against is for text"),
        (["--text", TEXT, "--against", "a"], "against is for reading activation_patching"),
        (["--text", TEXT, "--reading", "all", "--against", ""], "against is empty"),
        (["--text", TEXT, "--reading", "all", "--against", "@none"], "--against @none cannot be read"),
        (["--text", TEXT, "--reading", "expert_routing"], "reading expert_routing: no layer of this model has exper"),
    ],
)
def test_a_reading_that_cannot_be(arguments: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", model, *arguments]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert says in said


def test_the_names_are_in_the_help():
    arguments = app["inspect"].assemble_argument_collection(parse_docstring=True)
    (told,) = (argument.parameter.help for argument in arguments if argument.name == "--reading")
    assert all(name in told for name in READINGS)


def test_readings_of_a_model_without_attention(capsys: pytest.CaptureFixture[str]):
    show_inspection("mamba@1m+layers=1+d_model=32+vocab_size=256", "ab cd", as_json=True, reading=["all"])
    found = json.loads(capsys.readouterr().out)["readings"]
    given = {name for name, reading in found.items() if "error" not in reading}
    assert given == {"logit_attribution", "massive_activations", "token_similarity", "embedding_neighbours"}
    assert all("\n" not in found[name]["error"] for name in found.keys() - given)


def test_readings_without_matplotlib_are_printed(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inspection, "find_spec", lambda name: None)
    show_inspection(model, TEXT, reading=["head_scores"])
    out, err = capsys.readouterr()
    assert "head_scores: mean attention" in out and "figure:" not in out and "install it: pip" in " ".join(err.split())
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ("layer 3, head 1: +0.2", ("layer 3, head 1", "+0.2")),
        ("' :' and \": '\": 'a: b' 0.9", ("' :' and \": '\"", "'a: b' 0.9")),
        ("'to' (8) draws on 'a: b' 1.00", (None, "'to' (8) draws on 'a: b' 1.00")),
        ("L5 H3 +0.2", (None, "L5 H3 +0.2")),
        ("", (None, "")),
    ],
)
def test_lines_have_heads(line: str, cells: tuple[str | None, str]):
    found = HEADED.fullmatch(line)
    assert found is not None and found.groups() == cells


@pytest.mark.parametrize(
    ("reason", "code", "status"), [(KeyboardInterrupt, "stopped", 130), (MemoryError, "memory", 1)]
)
def test_readings_so_far_come_out(
    reason: type[BaseException],
    code: str,
    status: int,
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With what was read of the text, on the page too, and the reason."""

    def stop(_: object) -> None:
        raise reason

    monkeypatch.setitem(READINGS, "attention_sinks", stop)
    asked = ["token_similarity", "attention_sinks", "position_picture"]
    command = ["inspect", model, TEXT, *(word for one in asked for word in ("--reading", one)), "--out", "seen"]
    assert main([*command, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["code"] == code and found["loss"] > 0
    assert list(found["readings"]["attention_sinks"]) == list(found["readings"]["position_picture"]) == ["error"]
    assert "error" not in found["readings"]["token_similarity"]
    assert found["page"] == "seen/inspect.html" and (tmp_path / "seen" / "token_similarity.png").is_file()
    assert main(command) == status
    out = capsys.readouterr().out
    assert "token_similarity: " in out and "page: seen/inspect.html" in out
    with pytest.raises(reason) as caught:
        gf.inspect(model, TEXT, reading=asked, progress=False)
    assert list(caught.value.so_far.readings) == ["token_similarity"]
