"""A model with an encoder writes what `transformers` writes from the same source."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import glassformer as gf
from glassformer.cli import main
from glassformer.generation.beams import beams
from glassformer.generation.rules import Rules
from glassformer.model import Model
from glassformer.text import ByteTokenizer, CharTokenizer, load_tokenizer, prepare, with_special_token
from glassformer.text.pairs import source_ids
from glassformer.training.objectives.seq2seq import Seq2seqConfig
from tests.conversion.cases import CASES
from tests.refused import refused

SIZES: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": 61, "d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 28, "num_layers": 2,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    },
    "bart": {
        "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 28, "decoder_ffn_dim": 28, "max_position_embeddings": 48,
        "decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
    },
}  # fmt: skip
GAIN = {"t5": 1, "bart": 30}
"""Gain of the tied embedding: otherwise T5 would only repeat its source, and BART one token."""
NEW = 8
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}
Pair = tuple[Model, Any]


@pytest.fixture(params=list(SIZES))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """Ours and theirs."""
    other: Any = CASES[request.param].model(SIZES[request.param], seed=5)
    with torch.no_grad():
        other.get_output_embeddings().weight *= GAIN[request.param]
    other.save_pretrained(tmp_path)
    return gf.load(str(tmp_path), dtype=torch.float32).model, other


def wanted(other: Any, source: torch.Tensor, real: torch.Tensor, width: int) -> list[list[int]]:
    """Returns the new tokens of each row by `transformers`, with the one that ends it."""
    end, start = other.config.eos_token_id, other.config.decoder_start_token_id
    out = other.generate(source, attention_mask=real, num_beams=width, do_sample=False, max_new_tokens=NEW)
    rows = [row[1:] for row in out.tolist()]
    assert all(row[0] == start for row in out.tolist())
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns four sources (4, 9) of 9, 9, 4 and 1 tokens, and their mask."""
    source = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(source)
    real[2, 4:] = real[3, 1:] = 0
    return source, real


def test_greedy_text_is_that_of_transformers(pair: Pair) -> None:
    model, other = pair
    source, real = sources()
    end, start = other.config.eos_token_id, other.config.decoder_start_token_id
    texts = wanted(other, source, real, width=1)
    assert len({tuple(text) for text in texts}) > 1
    begin = torch.full((4, 1), start)
    padded = gf.generate(model, begin, NEW, source=source, source_documents=real, eos_id=end)
    for row, text in zip(padded[:, 1:].tolist(), texts, strict=True):
        assert row[: len(text)] == text
    given = [row[:n].tolist() for row, n in zip(source, real.sum(1), strict=True)]
    lists = gf.generate(model, [[start]] * 4, NEW, source=given, eos_id=end)
    assert [row[1:] for row in lists] == texts


def test_beams_are_those_of_transformers(pair: Pair) -> None:
    model, other = pair
    source, real = sources()
    ends, begin = {other.config.eos_token_id}, torch.tensor([[other.config.decoder_start_token_id]])
    for row, mask in zip(source[1:], real[1:], strict=True):
        alone = row[mask.bool()][None]
        (text,) = wanted(other, alone, torch.ones_like(alone), width=3)
        assert beams(model, begin, 3, NEW, ends, source=alone)[0].tokens == text


def test_forced_and_banned_tokens_are_those_of_transformers(pair: Pair, tmp_path: Path, capsys: Any) -> None:
    """Both may be in generation_config.json or, as in older folders, in config.json; `convert` keeps them."""
    _, other = pair
    source, real = sources()
    free = {token for text in wanted(other, source, real, width=1) for token in text[1:-1]}
    (banned, *_) = sorted(free - {other.config.eos_token_id, 7, 9})
    said = {"forced_bos_token_id": 7, "forced_eos_token_id": 9, "bad_words_ids": [[banned], [41]]}
    other.generation_config.update(**said)
    other.save_pretrained(tmp_path / "a")
    loaded = gf.load(tmp_path / "a", dtype=torch.float32)
    assert said.items() <= loaded.generation.items()
    rules, end = Rules.of(loaded.generation), other.config.eos_token_id
    begin = torch.tensor([[other.config.decoder_start_token_id]])
    for row, mask in zip(source, real, strict=True):
        alone = row[mask.bool()][None]
        for width in (1, 3):
            (text,) = wanted(other, alone, torch.ones_like(alone), width)
            assert text[0] == 7 and banned not in text
            found = beams(loaded.model, begin, width, NEW, {end}, source=alone, rules=rules)[0].tokens
            assert found == text and (len(text) < NEW or text[-1] == 9)
        greedy = gf.generate(loaded.model, begin.tolist(), NEW, source=alone, rules=rules, eos_id=end)
        assert greedy[0][1:] == wanted(other, alone, torch.ones_like(alone), 1)[0]
        drawn = gf.generate(loaded.model, begin, NEW, temperature=50.0, seed=1, source=alone, rules=rules)[0].tolist()
        assert drawn[1] == 7 and drawn[-1] == 9 and not {banned, 41} & {*drawn[2:]}
    both = gf.generate(loaded.model, [[2], [2, 8]], NEW, source=[[5, 6], [5, 6]], rules=rules)
    assert both[0][1] == 7 and both[1] == gf.generate(loaded.model, [[2, 8]], NEW, source=[[5, 6]], rules=rules)[0]
    settings = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "generation_config.json").unlink()
    more = {**said, "bad_words_ids": [[banned], [4, 5]], "no_repeat_ngram_size": 3, "num_beams": 4}
    (tmp_path / "a" / "config.json").write_text(json.dumps({**settings, **more}))
    loaded = gf.load(tmp_path / "a")
    assert more.items() <= loaded.generation.items()
    tokenizer = CharTokenizer(map(chr, range(65, 65 + loaded.model.vocab_size)))
    gf.save(loaded.model, tokenizer, tmp_path / "b", generation=loaded.generation)
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert gf.load(tmp_path / "c").generation == loaded.generation
    capsys.readouterr()
    asked = ["generate", str(tmp_path / "c"), "--source", "abc", "--temperature", "0", "--max-new-tokens", "4"]
    assert main([*asked, "--json"]) == 0
    shown, told = capsys.readouterr()
    assert json.loads(shown)["texts"][0]["text"].startswith(tokenizer.decode([7]))
    assert "num_beams=4, which is not applied" in told


RULED: dict[str, Any] = {
    "no_repeat_ngram_size": 2, "min_length": 7, "min_new_tokens": 6, "repetition_penalty": 1.7,
    "renormalize_logits": True,
}  # fmt: skip


@pytest.mark.parametrize("name", [*RULED, "bad_words_ids", "begin_suppress_tokens", "all"])
def test_rules_of_a_text_are_those_of_transformers(name: str, pair: Pair, tmp_path: Path) -> None:
    """Rules that depend on the text so far, in a greedy text and in beams; a rule changes at least one text."""
    _, other = pair
    source, real = sources()
    rows = [(row[mask.bool()][None], torch.ones(1, int(mask.sum()))) for row, mask in zip(source, real, strict=True)]
    end = wanted(other, *rows[0], 1)[0][2]  # a token that ends texts early
    other.config.eos_token_id = other.generation_config.eos_token_id = end
    free = {width: [wanted(other, *row, width)[0] for row in rows] for width in (1, 3)}
    said = RULED if name == "all" else {name: RULED[name]} if name in RULED else {}
    if name == "bad_words_ids":
        said = {name: [*(text[1:3] for text in free[1] if len(text) > 2), [end]]}
    if name == "begin_suppress_tokens":
        said = {name: sorted({text[0] for texts in free.values() for text in texts} - {end})}
    other.generation_config.update(**said)
    other.save_pretrained(tmp_path)
    loaded = gf.load(tmp_path, dtype=torch.float32)
    assert said.items() <= loaded.generation.items()
    begin, session = [other.config.decoder_start_token_id], gf.Session(loaded)
    options, changed = session.options(max_new_tokens=NEW), 0
    for i, row in enumerate(rows):
        (greedy,), (searched,) = wanted(other, *row, 1), wanted(other, *row, 3)
        ids = row[0][0].tolist()
        found = loaded.generate(begin, source=ids, max_new_tokens=NEW, temperature=0).tokens
        assert found[: len(greedy)] == greedy
        (best,) = session.search(begin, 3, options, source=ids)
        assert best.tokens[: len(searched)] == searched
        changed += (greedy, searched) != (free[1][i], free[3][i])
    assert changed or name == "renormalize_logits"


@pytest.mark.parametrize("said", [{"length_penalty": 8.0}, {"early_stopping": True}, {"length_penalty": -2.0},
                                  {"suppress_tokens": [5, 6, 7]}], ids=str)  # fmt: skip
def test_options_of_a_search_are_those_of_the_folder(pair: Pair, said: dict[str, Any], tmp_path: Path) -> None:
    """The oracle is generate of transformers; `convert` keeps the options."""
    _, other = pair
    other.generation_config.update(**said, num_beams=3)
    other.save_pretrained(tmp_path / "a")
    loaded = gf.load(tmp_path / "a", dtype=torch.float32)
    tokenizer = CharTokenizer(map(chr, range(65, 65 + loaded.model.vocab_size)))
    gf.save(loaded.model, tokenizer, tmp_path / "b", ends=loaded.ends, generation=loaded.generation)
    gf.convert(tmp_path / "b", tmp_path / "c", progress=False)
    kept = gf.load(tmp_path / "c")
    assert said.items() <= kept.generation.items()
    begin = [other.config.decoder_start_token_id]
    session = gf.Session(kept)
    source, real = sources()
    for row, mask in zip(source, real, strict=True):
        alone = row[mask.bool()]
        (text,) = wanted(other, alone[None], torch.ones_like(alone)[None], 3)
        options = session.options(max_new_tokens=NEW)
        (found,) = session.search(begin, 3, options, source=alone.tolist())
        assert [*found.tokens][: len(text)] == text


def test_rule_for_a_missing_token_is_refused(pair: Pair) -> None:
    for call in (gf.generate, partial(beams, width=2)):
        with refused(code="range", field="banned"):
            call(model=pair[0], tokens=torch.tensor([[2]]), source=[[5]], rules=Rules(banned=(61,)))


def test_rows_with_sources_generate_as_separate_rows(pair: Pair) -> None:
    model, _ = pair
    tokens, source = [[2], [2, 7, 9]], [[5, 6, 7, 8], [9, 4]]
    both, drawn = (gf.generate(model, tokens, NEW, source=source, **rule) for rule in ({}, DRAWN))
    assert both[1] == gf.generate(model, tokens[1:], NEW, source=source[1:])[0]
    assert drawn[0] == gf.generate(model, tokens[:1], NEW, source=source[:1], **DRAWN)[0] != both[0]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"source": None}, "missing", "source"),
        ({"source": [[1], [2]]}, "conflict", "source"),
        (
            {"source": torch.ones(1, 3, dtype=torch.long), "source_documents": torch.ones(1, 2)},
            "conflict",
            "source_documents",
        ),
        ({"source": [[]]}, "range", "source"),
        ({"source": [[3, 61]]}, "range", "source"),
        ({"source": [[1] * 49]}, "range", "source"),
        ({"source": [[1]], "model": gf.preset("llama@1m+vocab_size=61+layers=1").build()}, "conflict", "source"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_sources_are_refused_in_a_sentence(fields: dict[str, Any], code: str, field: str, tmp_path: Path) -> None:
    CASES["bart"].model(SIZES["bart"], seed=1).save_pretrained(tmp_path)
    asked = {"model": gf.load(str(tmp_path)).model, **fields}
    calls = [gf.generate] if "source_documents" in fields else [gf.generate, partial(beams, width=2)]
    for call in calls:
        with refused(code=code, field=field) as caught:
            call(tokens=torch.tensor([[2]]), **asked)
        assert "\n" not in str(caught.value)


def test_generate_command_with_source_equals_transformers(pair: Pair, tmp_path: Path, capsys: Any) -> None:
    """From a folder with a tokenizer; the start comes from its files."""
    model, other = pair
    loaded, tokenizer = gf.load(str(tmp_path)), CharTokenizer(map(chr, range(65, 65 + model.vocab_size)))
    folder = str(tmp_path / "with text")
    gf.save(model, tokenizer, folder, family=other.config.model_type, ends=loaded.ends, generation=loaded.generation)
    source = torch.tensor([tokenizer.encode("abcde").tolist()])
    for width, options in ((1, ["--temperature", "0"]), (3, ["--beams", "3"])):
        (ids,) = wanted(other, source, torch.ones_like(source), width)
        asked = ["generate", folder, "--source", "abcde", "--max-new-tokens", str(NEW), "--json", "--threads", "1"]
        assert main([*asked, *options]) == 0
        found = json.loads(capsys.readouterr().out)["texts"][0]
        assert found["text"] == tokenizer.decode([token for token in ids if token not in loaded.ends])


@pytest.mark.parametrize(
    ("expression", "cls"),
    [
        ("t5@1m+layers=2+d_model=64+heads=2+head.scale=0.125", "T5ForConditionalGeneration"),
        ("opus-mt@1m+layers=2+d_model=64+heads=2+embedding.scale=8+encoder.embedding.scale=8", "MarianMTModel"),
        ("transformer@1m+rope+layers=2+d_model=24+heads=2", "GlassformerForSeq2SeqLM"),
    ],
)
def test_a_run_writes_the_same_after_convert(expression: str, cls: str, tmp_path: Path, capsys: Any) -> None:
    """Its first token is the one that ends a text, because of its training, for any start token of the family."""
    recipe = {"steps": 2, "batch_size": 4, "context": 32, "objective": "seq2seq", "learning_rate": 0.05}
    trained = gf.train(gf.preset(expression), "pairs:reversal", recipe, out=tmp_path / "run", tokenizer="byte")
    run, folder = gf.load(tmp_path / "run"), str(tmp_path / "out")
    assert main(["convert", str(tmp_path / "run"), folder]) == 0
    assert f"{folder}: {cls}, " in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "run"), f"{folder}.gguf"]) == 2
    assert "this model has an encoder too" in capsys.readouterr().err
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    end = run.tokenizer.eos_id
    assert type(theirs).__name__ == cls and theirs.config.decoder_start_token_id == end
    assert gf.load(folder).generation == run.generation == trained.generation == {"decoder_start_token_id": end}
    gf.save(trained.model, trained.tokenizer, tmp_path / "plain")
    assert gf.load(tmp_path / "plain").generation == run.generation
    for place in (folder, tmp_path / "plain"):
        assert AutoTokenizer.from_pretrained(place)("ab").input_ids == source_ids(run.tokenizer, "ab", 32)
    capsys.readouterr()
    texts = []
    for name in (str(tmp_path / "run"), folder):
        assert main(["generate", name, "--source", "ab", "--temperature", "0", "--max-new-tokens", "8", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"][0]["text"])
    source = torch.tensor([source_ids(run.tokenizer, "ab", 32)])
    (ids,) = theirs.generate(source, do_sample=False, max_new_tokens=8).tolist()
    assert ids[0] == end
    assert texts[0] == texts[1] == run.tokenizer.decode([token for token in ids if token != end])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--source", "abc"], "no encoder, so it takes no source"),
        (["--source", ""], "no encoder"),
        (["--source", "abc", "--speculate"], "source does not go with speculate"),
        (["--source", "abc", "--compile"], "source does not go with compile"),
    ],
    ids=str,
)
def test_wrong_commands_are_refused_in_a_sentence(options: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    gf.save(gf.preset("llama@1m+vocab_size=257+layers=1").build(), ByteTokenizer(), tmp_path)
    assert main(["generate", str(tmp_path), *options, "--threads", "1"]) == 2
    problem = capsys.readouterr().err
    assert said in problem and len(problem.splitlines()) == 1


def test_generate_command_without_source_names_the_option(tmp_path: Path, capsys: Any) -> None:
    tokenizer = with_special_token(ByteTokenizer(), "eos_token", "<|endoftext|>")
    gf.save(gf.preset("t5@1m+vocab_size=258+layers=1").build(), tokenizer, tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "ab", "--threads", "1"]) == 2
    assert capsys.readouterr().err.endswith("give source=TEXT (--source TEXT)\n")


def adding(template: list[str], folder: Path) -> str:
    """Writes a tokenizer.json of bytes whose post-processor applies `template`; E is the end token, L a language."""
    file = with_special_token(ByteTokenizer(), "eos_token", "<|endoftext|>").with_specials(["en_XX"])
    end, language = file.eos_id, file.id_of("en_XX")
    file.save(folder)
    path = str(folder / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(path)
    specials = [{"id": "E", "ids": [end], "tokens": ["<|endoftext|>"]}, {"id": "L", "ids": [language], "tokens": ["L"]}]
    library.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=specials)
    library.save(path)
    return path


@pytest.mark.parametrize(
    ("template", "ids"),
    [(["$A", "E", "L"], [97, 256, 257]), (["L", "$A"], [257, 97, 256]), (["$A"], [97, 256])],
    ids=str,
)
def test_a_source_has_one_end(template: list[str], ids: list[int], tmp_path: Path) -> None:
    """mBART puts a language behind its own."""
    tokenizer = load_tokenizer(adding(template, tmp_path))
    assert source_ids(tokenizer, "a", 9) == ids
    if "E" in template:
        assert AutoTokenizer.from_pretrained(tmp_path)("a").input_ids == ids


def test_a_run_reads_sources_as_it_was_trained_on_them(tmp_path: Path) -> None:
    """Its tokenizer's file adds something else to a text; what was read in training is what is read from then on."""
    recipe = {"steps": 1, "batch_size": 4, "context": 32, "objective": "seq2seq"}
    tokenizer = adding(["L", "$A"], tmp_path / "tokenizer")
    config = gf.preset("transformer@1m+layers=2+d_model=24+heads=2")
    gf.train(config, "pairs:reversal", recipe, out=tmp_path / "run", tokenizer=tokenizer)
    run = gf.load(tmp_path / "run")
    text = prepare("pairs:reversal", tokenizer)
    (asked,) = Seq2seqConfig().asked(text, 1, run.config)
    assert asked.opening.source is not None
    words = text.tokenizer.decode(asked.source)
    gf.save(run.model, run.tokenizer, tmp_path / "out", generation=run.generation)
    for found in (run.tokenizer, gf.load(tmp_path / "out").tokenizer):
        assert source_ids(found, words, 32) == asked.opening.source.tolist()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(words).input_ids == asked.opening.source.tolist()


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab", separator=True)], ids=["byte", "char"])
def test_a_tokenizer_without_a_file_is_saved_as_sources_are_read(tokenizer: Any, tmp_path: Path) -> None:
    config = gf.preset(f"t5@1m+vocab_size={tokenizer.vocab_size}+layers=1")
    gf.save(config.build(), tokenizer, tmp_path)
    wanted = source_ids(tokenizer, "ab", 9)
    assert wanted[-1] == tokenizer.eos_id
    assert AutoTokenizer.from_pretrained(tmp_path)("ab").input_ids == wanted
    loaded = gf.load(tmp_path)
    assert source_ids(loaded.tokenizer, "ab", 9) == wanted
    assert loaded.generation == {"decoder_start_token_id": tokenizer.eos_id}


def test_a_text_of_a_vector_is_read_with_its_end_as_in_training(tmp_path: Path) -> None:
    recipe = {"steps": 1, "batch_size": 4, "context": 32, "objective": "contrastive"}
    config = gf.preset("bert@1m+pooled:mean+layers=1+d_model=24+heads=2")
    trained = gf.train(config, "pairs:reversal", recipe, out=tmp_path / "run", tokenizer="byte")
    gf.save(trained.model, trained.tokenizer, tmp_path / "out")
    for found in (gf.load(tmp_path / "run").tokenizer, gf.load(tmp_path / "out").tokenizer, trained.tokenizer):
        assert found.encode("ab", add_specials=True).tolist() == [97, 98, found.eos_id]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [97, 98, trained.tokenizer.eos_id]


def test_a_source_is_bounded_and_ends() -> None:
    assert source_ids(ByteTokenizer(), "ab", 3) == [97, 98, 256]
    for text in ("", "abc"):
        with refused(code="range", field="source"):
            source_ids(ByteTokenizer(), text, 3)


def test_a_search_takes_one_source() -> None:
    """The sentence names the search, which several prompts with a source each are not."""
    config = gf.preset("marian@0.1m+context=32+vocab_size=257")
    model = gf.Loaded(config.build(seed=0).eval(), config, ByteTokenizer())
    assert len(model.generate(["a", "b"], source=["c", "d"], max_new_tokens=2)) == 2
    with refused(code="conflict", field="source") as caught:
        model.generate(["a", "b"], source=["c", "d"], beams=2, max_new_tokens=2)
    assert "beams" in str(caught.value) and caught.value.value == 2
