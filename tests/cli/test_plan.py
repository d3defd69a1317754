"""The options of each mode of `plan`: others are refused in one sentence, never ignored."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.cli.verbs.planning import plan
from glassformer.planning.verbs import TAKES, Options
from tests.refused import refused

TINY = "llama@1m+vocab_size=512+layers=2"
MODES = {
    "generate": [], "train": ["--train"], "find": ["--find", "--gpu", "h100:2", "--batch", "2"], "here": ["--here"],
}  # fmt: skip
VALUES: dict[str, Any] = {
    "dtype": "float32", "state_dtype": "int8", "machine": "h100:2", "nodes": 2, "machines": "mine.yaml",
    "price": "2USD", "explain": None, "tokens": "1M", "optimizer": "lion", "recompute": "full", "layout": "dp=2",
    "micro_batch": 1, "weights": "bfloat16", "loss": "whole", "finetune": "lora:4", "out": "plan.html",
}  # fmt: skip
REFUSED = [(mode, name) for mode, taken in TAKES.items() for name in VALUES if name not in taken]


def test_the_verb_is_the_function():
    """Same options, same defaults; every one but the modes has a mode that takes it, and a type."""
    verb, function = inspect.signature(plan).parameters, inspect.signature(gf.plan).parameters
    options = set(function) - {"model", "command"}
    assert set(verb) - {"models", "json"} == options
    assert {name: verb[name].default for name in options} == {name: function[name].default for name in options}
    assert set().union(*TAKES.values()) == {*VALUES, "context", "batch"} == options - {*TAKES, "force"}
    assert set(Options.__annotations__) == options - {*TAKES, "finetune"} | {"command"}


@pytest.mark.parametrize(("mode", "name"), REFUSED, ids=[f"{mode}-{name}" for mode, name in REFUSED])
def test_an_option_of_another_mode_is_refused(mode: str, name: str, capsys: pytest.CaptureFixture[str]):
    if (mode, name) == ("generate", "finetune"):
        return  # it is a plan of training
    flag = f"--{name.replace('_', '-')}"
    given = [flag] if VALUES[name] is None else [flag, str(VALUES[name])]
    assert main(["plan", TINY, *MODES[mode], *given]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and ("at a time" in printed or name in printed)
    if name != "finetune":
        asked = {mode: True} if mode != "find" else {"find": True, "machine": "h100:2", "batch": 2}
        with refused(code="conflict", field=name):
            gf.plan(TINY, **asked, **{name: VALUES[name] or True})  # type: ignore[call-overload]


@pytest.mark.parametrize("modes", ["--generate --train", "--find --here", "--train --here", "--find --generate"])
def test_one_mode_at_a_time(modes: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", TINY, *modes.split()]) == 2
    assert "at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("--train --context 0", "context=0"), ("--find --gpu h100:2 --context 0", "context=0"),
        ("--here --context 0", "context=0"), ("--context 0", "context=0"), ("--train --batch 0", "batch=0"),
        ("--find --gpu h100:2 --batch -1", "batch=-1"), ("--batch 0", "batch=0"),
        ("--train --gpu h100 --tokens 0", "tokens must be"),
        ("--find --gpu h100:2 --batch 2 --tokens 0", "tokens must"),
        ("--train --tokens 1M", "left out without a machine"), ("--machines mine.yaml", "left out without a machine"),
        ("--gpu h100:9999999 --nodes 10 --train", "16,777,216 accelerators at most"),
        ("--gpu h100:9999999 --nodes 10", "16,777,216 accelerators at most"),
        ("--gpu h100 --price 2.5ÄÖÜ", "price must be"), ("--weights int4 --train", "weights must be"),
        ("--find", "such as h100:8"), ("--tokens 0", "tokens is not for"),
    ],
)  # fmt: skip
def test_impossible_plan_is_refused_in_one_sentence(asked: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", TINY, *asked.split()]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


def test_several_models_are_planned_side_by_side():
    """A list or a mapping gives `Plans`, which print as the verb does and are found by name; one model gives a plan."""
    config = gf.preset(TINY)
    several = gf.plan({"mine": config, "base": "gpt2@1m"}, batch=2)
    assert [one.name for one in several] == ["mine", "base"] and len(several) == 2
    assert several["mine"].to_dict() == {**gf.plan(config, batch=2, context=1024).to_dict(), "name": "mine"}
    assert [one["name"] for one in several.to_dict()] == ["mine", "base"]
    assert "mine" in str(several) and "base" in str(several) and f"{config.num_params():,}" in str(several)
    assert [one.name for one in gf.plan([config, TINY])] == ["model 1", TINY]
    with refused(code="missing", field="models"):
        gf.plan([])


def test_a_plan_prints_as_the_verb_prints_it(capsys: pytest.CaptureFixture[str]):
    for options, asked in (([], {}), (["--train", "--explain"], {"train": True, "explain": True})):
        assert main(["plan", TINY, *options]) == 0
        printed = capsys.readouterr().out
        assert printed.split() == str(gf.plan(TINY, **asked)).split()  # type: ignore[call-overload]
        assert main(["plan", TINY, *options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(gf.plan(TINY, **asked).to_dict()))]  # type: ignore[call-overload]


def test_a_plan_writes_its_page(tmp_path: Path):
    page = gf.plan(TINY, train=True, batch=2, command="glassformer plan mine --train").report(tmp_path / "plan.html")
    text = page.read_text(encoding="utf-8")
    assert "glassformer plan mine --train" in text and TINY in text
    bare = gf.plan(TINY).report(tmp_path / "bare.html").read_text(encoding="utf-8")
    assert 'class="gf-command"' in text and 'class="gf-command"' not in bare


def test_the_layout_that_is_found_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """--tokens, --explain and --out say of the fastest what a plan of it would."""
    page = tmp_path / "plan.html"
    command = ["plan", TINY, "--find", "--gpu", "h100:2", "--batch", "2", "--context", "64", "--tokens", "1G"]
    assert main([*command, "--explain", "--out", str(page)]) == 0
    told = capsys.readouterr().out
    assert "days: " in told and "made of" in told and "at the loss" in told
    assert main([*command, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    best = facts["fitting"][0]
    layout = ",".join(f"{name}={int(value)}" for name, value in best["layout"].items() if name in ("dp", "tp", "zero"))
    assert best["layout"]["recompute"] == "none" and best["layout"]["micro"] is not None
    again = gf.plan(
        gf.preset(TINY), train=True, machine="h100:2", batch=2, context=64, tokens="1G",
        layout=f"{layout},sp={int(best['layout']['sp'])},micro={best['layout']['micro']}",
    )  # fmt: skip
    assert again.run is not None and best["run"]["days"] == again.run.to_dict()["days"]
    assert str(best["memory"]["reserved"]) in page.read_text(encoding="utf-8")


def test_a_page_of_nothing_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "plan.html"
    assert main(["plan", "llama-2-70b", "--find", "--gpu", "l40s", "--context", "64", "--out", str(page)]) == 2
    assert "no page" in capsys.readouterr().err and not page.exists()


def test_plan_uses_the_memory_of_all_accelerators(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """70B in bf16 are 138 GB, not on one of 80 GB but on two; int8 are 69 GB. Nothing is timed that does not fit."""
    config = gf.preset("llama-2-70b")
    for machine, weights, fits, smallest in (
        ("h100", None, False, 2), ("h100:2", None, True, 2), ("h100:8", None, True, 2), ("h100", "int4", True, 1),
        ("h100", "int8", True, 1), ("a100-40gb", "int8", False, 2), ("a100-40gb", None, False, 4),
    ):  # fmt: skip
        one = gf.plan(config, machine=machine, weights=weights)
        assert (one.fits, one.smallest_count) == (fits, smallest), (machine, weights)
        assert (one.decoding is not None) == fits
        assert one.weight_bytes == config.num_params() * {None: 2, "int8": 1, "int4": 0.5}[weights]
    one = gf.plan(config, machine="h100:8")
    most = int((0.9 * 640e9 - one.weight_bytes) // one.state_bytes)
    assert one.room == 8 * 80e9 and one.batch_that_fits(one.room) == most
    many = gf.plan(config, machine="h100:8", batch=most)
    assert many.fits and not gf.plan(config, machine="h100:8", batch=most + 1).fits
    page = tmp_path / "plan.html"
    assert main(["plan", "llama-2-70b", "--generate", "--gpu", "h100", "--out", str(page)]) == 0
    assert "It does not fit; 2 NVIDIA H100 SXM would hold it." in page.read_text(encoding="utf-8")
    told = capsys.readouterr().out
    assert "no: 2 would do (tp=2)" in told and "tokens a second" not in told and "cost" not in told
    assert main(["plan", "llama-2-70b", "--generate", "--gpu", "h100", "--weights", "int4"]) == 0
    told = capsys.readouterr().out
    assert "tokens a second" in told and "in int4" in told and "in int8" in told


def test_packed_weights_are_read_faster():
    """A step of one sequence at no context reads little but weights."""
    whole, packed = (gf.plan(gf.preset("llama-7b"), machine="h100", context=1, weights=kept) for kept in (None, "int4"))
    assert whole.decoding is not None and packed.decoding is not None
    assert whole.decoding.seconds[0] == pytest.approx(4 * packed.decoding.seconds[0], rel=0.01)
    assert packed.decoding.roof(1)[1] == whole.decoding.roof(1)[1], "products are in bf16 as before"
    assert packed.state_bytes == whole.state_bytes


def test_accelerators_that_would_do_are_a_number_that_divides_the_kv_heads():
    """149 GB fill 3 H100 at 0.9 of 80 GB. vLLM refuses 3 ranks for 8 KV heads (vllm/model_executor/models/llama.py:
    `assert self.total_num_kv_heads % tp_size == 0`), and takes 1, 2, 4 and 8."""
    asked = {"batch": 8, "context": 4096}
    one, three = (gf.plan("llama-2-70b", machine=machine, **asked) for machine in ("h100", "h100:3"))  # type: ignore[call-overload]
    assert 2 * 0.9 * 80e9 < one.bytes <= 3 * 0.9 * 80e9
    assert (one.smallest_count, str(one.smallest)) == (4, "tp=4")
    assert not three.fits and three.room == 2 * 80e9
    assert gf.plan("llama-2-70b", machine="h100:4", **asked).fits  # type: ignore[call-overload]
    many = gf.plan("llama-2-70b", machine="h100:8", nodes=4, batch=800, context=4096)
    assert str(many.layout) == "tp=8,pp=4" and many.smallest_count == 24, "17 accelerators, in nodes of tp=8"
    small = gf.plan("qwen3-8b", machine="h100:3", **asked)  # type: ignore[call-overload]
    assert small.fits and small.decoding is not None and small.decoding.cluster.count == 2
    single = gf.plan("gpt2+mqa", machine="l40s", batch=2000, context=1024)
    assert str(single.smallest) == "tp=1" or single.smallest.pp == single.smallest_count


def test_models_side_by_side_are_planned_at_one_context(capsys: pytest.CaptureFixture[str]):
    """qwen3-8b is trained for 40,960 tokens, llama-2-70b for 4,096 (their config.json): states are compared alike."""
    plans = gf.plan(["llama-2-70b", "qwen3-8b"])
    assert [one.context for one in plans] == [4096, 4096] and plans.shortened == {"qwen3-8b": 40960}
    assert plans["qwen3-8b"].state_bytes == 4096 * 2 * 36 * 8 * 128 * 2
    assert gf.plan("qwen3-8b").context == 40960
    assert gf.plan(["llama-2-70b", "qwen3-8b"], context="8k").shortened == {}
    assert main(["plan", "llama-2-70b", "qwen3-8b"]) == 0
    told = capsys.readouterr().out
    assert "40,960" in told and "--context" in told


def test_a_step_that_does_not_fit_has_no_time_and_no_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Weights, gradients and moments of 6.7e9 parameters in fp32 are 16 bytes each: 108 GB on one card of 80."""
    asked = ["plan", "llama-7b", "--train", "--gpu", "h100:8", "--batch", "64", "--context", "2048", "--tokens", "1T"]
    page = tmp_path / "plan.html"
    assert main([*asked, "--layout", "dp=8", "--out", str(page)]) == 0
    told = capsys.readouterr().out
    assert "does not fit" in told and not any(word in told for word in ("days", "USD\n", "time of a step", "MFU"))
    assert " days" not in page.read_text(encoding="utf-8").split('<script type="application/json"')[0]
    assert main([*asked, "--layout", "dp=8", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["fits"] is False and "run" not in facts and "time" not in facts
    assert main([*asked, "--layout", "dp=8,zero=3"]) == 0
    layout = capsys.readouterr().out.partition("--layout ")[2].split()[0]
    assert main([*asked, "--layout", layout]) == 0
    assert "days" in capsys.readouterr().out, "the layout that is named fits"


def test_microbatch_option_equals_the_word_of_the_layout():
    asked = {"train": True, "machine": "h100:8", "batch": 64, "context": 64}
    by_option = gf.plan("llama@1m", micro_batch=2, **asked)  # type: ignore[call-overload]
    by_word = gf.plan("llama@1m", layout="dp=8,zero=3,micro=2", **asked)  # type: ignore[call-overload]
    assert by_option.microbatch == by_word.microbatch == 2 and by_option.memory == by_word.memory
    for code, layout, micro in (("conflict", "dp=8,micro=4", 2), ("range", None, 0), ("conflict", None, 3)):
        with refused(code=code, field="micro" if micro == 3 else "micro_batch"):
            gf.plan("llama@1m", layout=layout, micro_batch=micro, **asked)  # type: ignore[call-overload]


def test_batch_that_ranks_cannot_share_names_one_that_they_can():
    for layout, batch, enough in (("dp=8,zero=3", 1, 8), ("dp=8,zero=3", 12, 16), ("dp=2,micro=4", 4, 8)):
        with pytest.raises(gf.RequestError) as caught:
            gf.plan("llama@1m", train=True, layout=layout, batch=batch)
        assert caught.value.code == "conflict" and f"--batch {enough})" in str(caught.value)
        gf.plan("llama@1m", train=True, layout=layout, batch=enough, context=64)


def test_a_plan_shows_shares_and_the_option_that_adds_cost(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "llama-2-70b"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(": ")[1].startswith("ffn 81.7%, mixer 17.5%, ")
    step = ["plan", "llama-3-8b", "--train", "--batch", "8", "--machine", "h100:8"]
    for more, told in (([], True), (["--tokens", "1T"], False)):
        assert main([*step, *more]) == 0
        assert ("add --tokens" in capsys.readouterr().out) == told
