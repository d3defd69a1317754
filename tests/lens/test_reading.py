"""The interface that all readings share: comparison, summary in a line, and drawing into a file."""

from __future__ import annotations

from pathlib import Path

import torch

import glassformer as gf
from glassformer.lens import Reading
from glassformer.text import ByteTokenizer
from tests.refused import failed, refused

TOKENS = (torch.arange(24).view(2, 12) * 7) % 31


def readings() -> list[object]:
    model = gf.preset("llama@1m+layers=2+d_model=32+heads=4+vocab_size=31+context=64").build(seed=0).eval()
    experts = gf.preset("llama@1m+moe:4:2+layers=2+d_model=32+heads=4+vocab_size=31+context=64").build(seed=0)
    bytes_ = gf.preset("llama@1m+layers=1+d_model=32+heads=4+vocab_size=256+context=256").build(seed=0).eval()
    with gf.edit(model, {"embed": lambda x: x * 1e4}):
        return [
            gf.lens.attention_map(model, TOKENS[0], 1, 2),
            gf.lens.attention_maps(model, TOKENS[0]),
            gf.lens.attention_rollout(model, TOKENS[0]),
            gf.lens.side_by_side(model, TOKENS[0], 0, 1),
            gf.lens.attention_distance(model, TOKENS),
            gf.lens.meaning_scores(bytes_, ByteTokenizer(), n=1),
            gf.lens.attention_sinks(model, TOKENS),
            gf.lens.massive_activations(model, TOKENS),
            gf.lens.token_similarity(model, TOKENS),
            gf.lens.head_scores(model, 5),
            gf.lens.head_ablation(model, TOKENS),
            gf.lens.activation_patching(model, TOKENS, TOKENS.flip(0), lambda logits: logits[0, -1, 5]),
            gf.lens.logit_lens(model, TOKENS[0]),
            gf.lens.logit_attribution(model, TOKENS[0]),
            gf.lens.embedding_neighbours(model, TOKENS[0]),
            gf.lens.position_picture(model),
            gf.lens.expert_routing(experts, TOKENS),
            gf.lens.inspect(model, TOKENS[0]),
        ]


def test_readings_have_equality_and_a_one_line_repr():
    some, others = readings(), readings()
    assert {type(one) for one in some} >= set(Reading.__subclasses__())
    for one, other in zip(some, others, strict=True):
        assert one == one and one != other and len({one, other, one}) == 2
        assert repr(one).startswith(f"{type(one).__name__}(") and "tensor" not in repr(one)
        assert "\n" not in repr(one) and len(repr(one)) < 160


def test_repr_of_a_reading_without_summary_is_its_title():
    class Mute(Reading):
        title = "nothing"

    assert repr(Mute()) == "Mute(nothing)"


def test_figure_format_follows_the_file_name(tmp_path: Path):
    model = gf.preset("llama@1m+layers=1+d_model=32+heads=4+vocab_size=31+context=64").build(seed=0)
    found = gf.lens.attention_map(model, TOKENS[0], 0, 0)
    for name, begins in (("a.png", b"\x89PNG"), ("b.SVG", b"<?xml"), ("c.pdf", b"%PDF")):
        found.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    for name in ("layer.3", "map", "map.npy"):
        with refused(code="unknown", field="path"):
            found.save(tmp_path / name)
    with refused(code="missing", field="path"):
        found.save(str(tmp_path / "missing" / "a.png"))
    (tmp_path / "d.png").mkdir()
    with failed(code="disk"):
        found.save(tmp_path / "d.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.SVG", "c.pdf", "d.png"}
