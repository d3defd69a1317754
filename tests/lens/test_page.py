"""The page of an inspection: whole, self-contained, true to its data, safe against its words."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from glassformer.lens import attention_map, inspection
from glassformer.lens.inspection import Inspection, inspect
from glassformer.lens.page.words import visible
from glassformer.naming import preset
from glassformer.text import ByteTokenizer
from tests.refused import failed

from .test_inspection import TOKENS, Mean, close, loud

VOID = {"meta", "input", "br", "wbr", "hr", "img", "link"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "--><!--",
    "]]>",
    "\u202eevil\u202c",
    "\x00\x07\x1b[31m",
    "&lt;b&gt;",
    "\u2028\u2029",
    "שלום",
    "\ud800",
    "x" * 10_000,
]


class Page(HTMLParser):
    """A page taken apart: tags in balance or not, attributes, words, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.strip: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{name}> is never closed" for name, _ in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "span" and self.inside("strip"):
            self.strip.append("")
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1][0] != tag:
            self.faults.append(f"</{tag}> inside {self.open[-2:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif self.open and self.open[-1][0] == "span" and self.inside("strip"):
            self.strip[-1] += data
        elif not self.open or self.open[-1][0] != "style":
            self.words.append(data)

    def inside(self, key: str) -> bool:
        return any(attrs.get("id") == key for _, attrs in self.open)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "inspection"))

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def arrays(data: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of the page's data as its script reads them."""
    buffer = zlib.decompress(base64.b64decode(data["bytes"]))
    return {name: np.frombuffer(buffer, kind, count, first) for name, (kind, first, count) in data["arrays"].items()}


def weights(codes: np.ndarray) -> torch.Tensor:
    return torch.tensor((codes / np.iinfo(codes.dtype).max) ** 2)


def floats(halves: np.ndarray) -> torch.Tensor:
    return torch.tensor((halves.astype(np.uint32) << 16).view(np.float32))


@pytest.fixture(scope="module")
def seen() -> Inspection:
    return inspect(loud("llama@1m+gqa:2"), TOKENS, name="llama")


@pytest.fixture(scope="module")
def page(seen: Inspection) -> Page:
    return Page(seen.html())


def test_it_is_whole(page: Page, seen: Inspection):
    assert page.faults == []
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for key in (
        "strip",
        "layer",
        "head",
        "token",
        "head-grid",
        "map",
        "map-table",
        "at",
        "by",
        "lens-grid",
        "predictions",
    ):
        assert key in ids
    script = page.scripts[-1][1]
    asked = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert asked and asked <= set(ids)
    assert page.strip == list(seen.words)
    for words in ("llama", "nats", "Every head", "What each depth would say", "uniform guess among 61"):
        assert words in page.text


def test_nothing_is_fetched_and_nothing_else_runs(page: Page, seen: Inspection):
    text = seen.html()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"//[^\n]*", "", text.split("<body>")[0]))
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "form", "base", "img"}
        assert not {"src", "srcset", "action", "data"} & set(attrs) and (attrs.get("href") or "#").startswith("#")
        assert not [name for name in attrs if name.startswith("on")]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    runs = [text for attrs, text in page.scripts if attrs.get("type") != "application/json"]
    fingerprint = base64.b64encode(hashlib.sha256(runs[0].encode()).digest()).decode()
    assert len(runs) == 1 and f"script-src 'sha256-{fingerprint}'" in (policy or "")
    assert (policy or "").startswith("default-src 'none'")
    assert not re.search(r"\beval\(|innerHTML|new Function|document\.write|fetch\(|XMLHttp|import\(", runs[0])


def test_page_data_equals_the_inspection(page: Page, seen: Inspection):
    data = page.data
    found = arrays(data)
    assert data["words"] == list(seen.words) and data["ids"] == TOKENS.tolist()
    for layer, kept in seen.attention.items():
        assert data["layers"][layer] == {
            "heads": 4, "rows": 19, "columns": 19, "tile": 1, "keep": 8, "keyHeads": 2,
        }  # fmt: skip
        close(weights(found[f"map{layer}"]).view(4, 19, 19), kept.maps, atol=2e-5, rtol=0)
        assert found[f"keys{layer}"].tolist() == kept.keys.flatten().tolist()
        close(weights(found[f"weights{layer}"]), kept.weights.flatten(), atol=2e-5, rtol=0)
        close(weights(found[f"rest{layer}"]), kept.rest.flatten(), atol=2e-5, rtol=0)
        close(found[f"received{layer}"], kept.received.flatten())
        assert found[f"seen{layer}"].tolist() == kept.seen_by.flatten().tolist()
    shape = seen.top_ids.shape
    assert [data["tableIds"][i] for i in found["top"]] == seen.top_ids.flatten().tolist()
    assert [data["table"][i] for i in found["top"]][:9] == [str(i) for i in seen.top_ids.flatten().tolist()[:9]]
    close(weights(found["shares"]).view(shape), seen.top_probabilities, atol=2e-5, rtol=0)
    loss = floats(found["loss"]).view(seen.depth_loss.shape)
    close(loss, seen.depth_loss, atol=0, rtol=0.004, equal_nan=True)
    close(floats(found["rms"]).view(seen.residual_rms.shape), seen.residual_rms, atol=0, rtol=0.004)
    rows = {(row[0], row[1]): row[2:] for row in data["heads"]}
    for head in seen.heads:
        names = [name for name, _ in data["measures"]]
        expected = [getattr(head, name) for name in names]
        assert rows[head.layer, head.head] == pytest.approx(expected, rel=1e-3, abs=1e-9)
    start = data["start"]
    best = max(seen.heads, key=lambda head: head.elsewhere)
    assert (start["layer"], start["head"], start["token"]) == (best.layer, best.head, 18)


def test_pooled_maps_and_their_strongest_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspection, "FINE", 8)
    seen = inspect(loud("llama@1m"), TOKENS)
    page = Page(seen.html())
    assert page.data["layers"][1] == {
        "heads": 4, "rows": 7, "columns": 7, "tile": 3, "keep": 8, "keyHeads": 4,
    }  # fmt: skip
    found, kept = arrays(page.data), seen.attention[1]
    assert found["keys1"].tolist() == kept.keys.flatten().tolist()
    close(weights(found["weights1"]), kept.weights.flatten(), atol=2e-5, rtol=0)
    assert "some tokens share a row and a column" in page.text and "3 tokens to a cell" in page.text


def test_hostile_words():
    tokens = list(range(len(HOSTILE)))
    seen = inspect(loud("llama@1m"), tokens, cast(Any, Spells()), name="</title><script>alert(2)</script>")
    page = Page(seen.html())
    assert page.faults == [] and len(page.scripts) == 3
    assert page.strip == [visible(word).replace("\ud800", "\ufffd") for word in HOSTILE]
    assert page.data["words"] == [visible(word) for word in HOSTILE]
    text = seen.html()
    text.encode("utf-8")
    assert not set(text) & {"\x00", "\x07", "\x1b", "\u202e", "\u202c", "\u2028", "\u2029"}
    assert "alert(1)</script>" not in text and "alert(2)</script>" not in text and "<img" not in text


class Spells:
    """A tokenizer whose words are an attack."""

    vocab_size = 61

    def decode(self, ids: Any) -> str:
        return "".join(HOSTILE[i] if i < len(HOSTILE) else "a" for i in ids)


def test_bytes_that_share_a_character():
    ids = ByteTokenizer().encode("é😀\n").tolist()
    model = loud("llama@1m+vocab_size=257")
    page = Page(inspect(model, ids, ByteTokenizer()).html())
    assert page.strip == ["⋯", "é", "⋯", "⋯", "⋯", "😀", "↵"]


def test_other_models():
    random = inspect(loud("gpt2@1m"), TOKENS, trained=False)
    assert "Not trained." in Page(random.html()).text
    both = Page(inspect(loud("gpt2@1m+bidirectional"), TOKENS).html())
    assert both.data["causal"] is False and "the whole text" in both.text
    model = loud("llama@1m")
    for layer in model.layers:
        layer.mixer = Mean()
    bare = Page(inspect(model, TOKENS).html())
    assert bare.faults == [] and "No layer has attention maps" in bare.text and bare.data["layers"] == [None] * 3
    assert Page(inspect(loud("llama@1m"), [3]).html()).faults == []


def test_a_long_text_stays_small():
    """4,096 tokens of a model with 4 heads."""
    model = loud("llama@1m+layers=1+context=4096")
    ids = torch.randint(61, (4096,), generator=torch.Generator().manual_seed(1))
    seen = inspect(model, ids)
    text = seen.html()
    assert seen.attention[0].maps.shape == (4, 128, 128) and len(text) < 1_700_000
    assert len(Page(text).strip) == 4096


def test_page_has_its_command_and_download():
    command = "glassformer inspect llama@1m --text 'it is <b>&'"
    seen = inspect(loud("llama@1m"), TOKENS, name="llama", command=command)
    page = Page(seen.html())
    assert command in page.text
    reading = next(text for attrs, text in page.scripts if attrs.get("id") == "reading")
    assert json.loads(reading) | {"page": None} == json.loads(json.dumps(seen.to_dict()))
    links = {attrs.get("data-download"): attrs.get("download") for tag, attrs in page.tags if tag == "a"}
    assert links["reading"] == "inspection.json"
    where = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert {link[1:] for link in where} <= {attrs["id"] for _, attrs in page.tags if "id" in attrs}


def test_its_title_has_the_text():
    tokens = ByteTokenizer().encode(
        "The cat sat\non the mat, and then it sat on every other mat there was in the house."
    )
    seen = inspect(loud("llama@1m+vocab_size=257+context=128"), tokens, ByteTokenizer(), name="llama")
    found = re.search(r"<title>(.*?)</title>", seen.html())
    assert found and found[1].startswith("llama reads “The cat sat on the mat, and") and found[1].endswith("…”")
    ids = inspect(loud("llama@1m"), [5, 17, 3], name="llama")
    assert "<title>llama reads “5 17 3”</title>" in ids.html()
    far = inspect(loud("llama@1m"), [5], name=f"/{'long/' * 20}second-run")
    assert re.search(r"<title>…[a-z/]+/second-run reads “5”</title>", far.html())


def test_page_names_mixers_and_heads_that_share_keys():
    page = Page(inspect(loud("llama@1m+gqa:2"), TOKENS).html())
    assert "4 in each of 3 layers, on 2 KV heads" in page.text and "A bracket joins the 2 query heads" in page.text
    page = Page(inspect(loud("llama@1m+window:5"), TOKENS).html())
    assert page.data["mixers"] == ["attention, window of 5"] * 3 and "A bracket" not in page.text
    page = Page(inspect(preset("llama@1m+mamba+layers=3+d_model=16+vocab_size=61").build().eval(), TOKENS).html())
    assert page.data["mixers"] == ["mamba"] * 3 and "its mixers are mamba" in page.text


def test_charts_whose_values_are_far_apart_are_logarithmic(seen: Inspection):
    frames = charts(replace(seen, depth_loss=torch.tensor([100.0, 20.0, 8.0, 4.0])[:, None].expand(4, 19)))
    assert frames["Loss, nats per token"]["log"] and 3 < frames["Loss, nats per token"]["low"] <= 4
    frames = charts(replace(seen, depth_loss=torch.tensor([5.0, 4.5, 4.2, 4.1])[:, None].expand(4, 19)))
    assert not frames["Loss, nats per token"]["log"]


def test_one_huge_token_is_named_and_moves_no_curve(seen: Inspection):
    """The layer is named too: the stream is 2,000 at token 7 from layer 1 on, and 2 at all other tokens."""
    rms = torch.full((4, 19), 2.0)
    rms[2:, 7] = torch.tensor([2000.0, 900.0])
    page = replace(seen, residual_rms=rms)
    said = f"Token 7, ‘{TOKENS[7]}’, is an outlier from layer 1 on: after layer 1 its stream is 1k times"
    assert said in Page(page.html()).text
    assert page.median_rms.tolist() == [2.0] * 4
    assert "No token is an outlier" in Page(replace(seen, residual_rms=torch.full((4, 19), 2.0)).html()).text


def charts(seen: Inspection) -> dict[str, Any]:
    """The y axis of each chart, by what it measures."""
    found = [attrs for _, attrs in Page(seen.html()).tags if attrs.get("data-frame")]
    return {str(one["aria-label"]).split(". ")[0]: json.loads(str(one["data-frame"]))["y"] for one in found}


def test_it_is_written_as_a_whole(seen: Inspection, tmp_path: Path):
    path = seen.report(tmp_path / "deep" / "inspect.html")
    assert path.read_text(encoding="utf-8") == seen.html()
    assert [found.name for found in path.parent.iterdir()] == ["inspect.html"]


def test_a_place_that_cannot_be_written_is_named(seen: Inspection, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "file" / "inspect.html", tmp_path / "folder.html"):
        with failed(code="disk") as caught:
            seen.report(path)
        assert str(path) in str(caught.value) and "CACHE" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.html"}


def test_it_shows_itself_in_a_notebook(seen: Inspection):
    frame = seen._repr_html_()
    found = re.fullmatch(r'<iframe [^<>]*sandbox="allow-scripts"[^<>]*srcdoc="([^"]*)"></iframe>', frame)
    assert found and html.unescape(found[1]) == seen.html()


@pytest.mark.parametrize("name", ["inspect.css", "inspect.js"])
def test_its_parts_come_with_the_package(name: str):
    assert len(files("glassformer.lens.page").joinpath(name).read_text(encoding="utf-8")) > 1000


def test_layers_without_softmax_have_their_effective_maps():
    """The page has the maps that `attention_map` draws one by one; a layer of attention has no effective map."""
    model = preset("llama@1m+layers=3+heads=4+vocab_size=61+context=64+stack:retention,attention,mamba").build().eval()
    seen = inspect(model, TOKENS)
    page = Page(seen.html())
    assert list(seen.effective) == [0, 2] and page.data["answers"] == {"0": [len(TOKENS)] * 2, "2": [len(TOKENS)] * 2}
    assert "Layers without softmax" in page.text and "4 of 256 channels" in page.text
    for layer, kept in seen.effective.items():
        for one, weights, largest in zip(kept.which, kept.maps, kept.largest, strict=True):
            wanted = attention_map(model, TOKENS, layer, one)
            torch.testing.assert_close(weights, wanted.weights)
            assert f"{kept.of} {one}, up to" in page.text and largest > 0
    assert inspect(loud("llama@1m"), TOKENS).effective == {}
