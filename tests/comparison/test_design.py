"""A design is a value and a file; what is wrong with it is refused when it is made."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import glassformer as gf
from glassformer.cli import main, options
from glassformer.cli.verbs import training as verbs
from glassformer.comparison import verbs as carrying
from glassformer.comparison.design import FILE, design_of, to_yaml
from glassformer.config import MAX_FILE_BYTES, read_tree
from glassformer.errors import Code, RequestError, WorkError
from glassformer.laboratory.ladder import LadderDesign
from glassformer.laboratory.scaling import ScalingDesign
from glassformer.naming import preset
from glassformer.runs.events import Kept
from glassformer.runs.executor import Local
from glassformer.runs.results import VERSION, Budget, Data, Results
from glassformer.text import Tokens, prepare
from glassformer.training.objectives import MaskedConfig
from glassformer.training.optimizers import MuonConfig
from glassformer.training.schedule import CosineConfig
from tests.refused import failed, refused
from tests.runs.stand_in import AT_ONCE

TINY = "+layers=1+d_model=32+heads=2"
A, B = f"gpt2@1m{TINY}", f"llama@1m{TINY}"
PLAN: dict[str, Any] = {"tokens": 768, "batch_size": 4, "context": 32, "threads": 1, "dtype": "float32"}


DESIGNS: dict[str, Callable[[], gf.Design]] = {
    "plain": lambda: gf.Design.of([A, B], "text.txt", **PLAN),
    "named": lambda: gf.Design.of({"mine": preset(A), "base": f"{B}+recipe.warmup=0.1"}, "text.txt", **PLAN),
    "unnamed configs": lambda: gf.Design.of([preset(A), B], None, **PLAN),
    "of parts": lambda: gf.Design.of(
        [A], "x", objective=MaskedConfig(mask=0.9), optimizer=MuonConfig(momentum=0.9),
        schedule=CosineConfig(warmup=0.5), weight_decay=0.3, seed=7, minutes=1.5,
    ),
    "tuned": lambda: gf.Design.of([A, B], "x", tune=True, within=30, looks=[3, 5], **PLAN),
    "a pilot": lambda: gf.Design.of([A, B], "x", power=0.01, tokenizer="bpe:300", **PLAN),
    "steps": lambda: gf.Design.of([A], "x", steps="2k", match="tokens", log_to=[], loss_alone=True),
    "by FLOPs": lambda: gf.Design.of(["gpt2@1m", "llama@1m"], "x", flops="1e12", allow_unmatched=True),
}  # fmt: skip


@pytest.mark.parametrize("name", DESIGNS)
def test_a_file_is_read_as_the_design_that_was_written(name: str, tmp_path: Path) -> None:
    design = DESIGNS[name]()
    design.save(tmp_path)
    assert gf.Design.from_file(tmp_path / FILE) == design
    assert gf.Design.from_dict(yaml.safe_load(to_yaml(design.to_dict()))) == design


def test_an_arm_at_a_changed_rate_is_read_as_it_was_written() -> None:
    design = DESIGNS["named"]()
    tried = design.replace(arms=tuple(arm.changed(["recipe.learning_rate=0.003"]) for arm in design.arms))
    assert gf.Design.from_dict(tried.to_dict()) == tried
    rates = [plan.learning_rate for plan in tried.plans(tried.configs, 1).values()]
    assert rates == [0.003, 0.003]


def test_ladders_and_scaling_laws_are_files(tmp_path: Path) -> None:
    ladder = LadderDesign.of("gpt2@1m", "x", changes="rope,rmsnorm", tokens="1M", tune=True)
    assert LadderDesign.from_dict(yaml.safe_load(to_yaml(ladder.to_dict()))) == ladder
    laws = ScalingDesign.of(["gpt2", "llama"], "x", sizes="0.1m..1.6m", budgets="250k..4M", seeds=3, flops=[1e15])
    assert ScalingDesign.from_dict(yaml.safe_load(to_yaml(laws.to_dict()))) == laws


def test_counts_and_usual_values_make_the_same_design() -> None:
    plain = gf.Design.of([A], "x", tokens=200_000)
    assert plain == gf.Design.of([A], "x", tokens="200k", batch_size=16, seed=0, learning_rate=None, context=None)
    assert plain == gf.Design.of([A], Path("x"), recipe={"tokens": 200_000})
    assert plain == gf.Design.of([A], "x", recipe=gf.Recipe.of(tokens=200_000))
    assert gf.Design.of([A], "x", tune=True, tokens=1).seeds == 3 and plain.seeds == 1


def test_a_tuned_design_is_the_plain_one_that_tunes() -> None:
    plain = gf.Design.of([A, B], "x", seeds=3, **PLAN)
    tuned = gf.Design.of([A, B], "x", tune=True, **PLAN)
    assert tuned.replace(tune=False) == plain and plain.replace(tune=True) == tuned


def test_a_keyword_counts_instead_of_the_field_of_a_recipe() -> None:
    """In making a design, in changing it, and in the verbs, which do both by the same function."""
    for recipe in ({"tokens": 64}, gf.Recipe.of(tokens=64)):
        assert gf.Design.of([A], "x", tokens=96, recipe=recipe).tokens == 96
        assert gf.Design.of([A], "x", tokens=96).replace(recipe=recipe).tokens == 64
        held = gf.Design.of([A], "x", tokens=1)
        for given in ([A], held):
            made, text = design_of(gf.Design, given, "y", {"tokens": 96, "seeds": None}, {"recipe": recipe})
            assert (made.tokens, made.data, text) == (96, "y", None)
        with refused(code="conflict", field="budget"):
            gf.Design.of([A], "x", minutes=1, recipe=recipe)
    for wrong in ({"tokens": 64, "seeds": 2}, {"seeds": 2}):
        with refused(code="unknown", field="seeds"):
            gf.Design.of([A], "x", tokens=96, recipe=wrong)
    with refused(code="conflict", field="tokens"):
        gf.Design(arms=[A], tokens=1000, recipe={"tokens": 3})  # type: ignore[arg-type]


def test_a_design_that_is_given_changes_in_every_verb() -> None:
    """Ladders and scaling laws let everything change that they take; nothing is dropped."""
    ladder = LadderDesign.of("gpt2@1m", "x", changes="rope", tokens="1M", batch_size=4)
    asked = {"changes": "rmsnorm,rope", "to": None, "design": "factorial", "seeds": 4}
    made, _ = design_of(LadderDesign, ladder, "y", asked, {"batch_size": 8})
    wanted = LadderDesign.of("gpt2@1m", "y", changes="rmsnorm,rope", design="factorial", seeds=4, tokens="1M",
                             batch_size=8)  # fmt: skip
    assert made == wanted != ladder
    with refused(code="range", field="seeds"):
        ladder.replace(seeds=1)
    with refused(code="range", field="tokens"):
        ladder.replace(tokens=1)
    law = ScalingDesign.of(["gpt2"], "x", sizes="0.1m..1.6m", budgets="250k..4M", recipe={"batch_size": 4})
    changed, _ = design_of(ScalingDesign, law, "y", {"sizes": "0.1m..3m", "far": True, "hours": None}, {"seeds": 3})
    again = ScalingDesign.of(["gpt2"], "y", sizes="0.1m..3m", budgets="250k..4M", batch_size=4, far=True, seeds=3)
    assert changed == again != law
    for wrong in ({"recipe": {"tokens": 3}}, {"tokens": 3}):
        with refused(code="conflict", field="tokens"):
            law.replace(**wrong)
    with refused(code="conflict", field="flops"):
        ScalingDesign.of(["gpt2"], "x", sizes="0.1m..1.6m", budgets="250k..4M", recipe={"flops": 1e9})


def test_a_design_does_not_change_and_has_a_hash() -> None:
    made: list[Any] = [
        *(make() for make in DESIGNS.values()),
        LadderDesign.of({"mine": preset("gpt2@1m")}, "x", changes=["rope"], tokens="1M"),
        ScalingDesign.of({"mine": preset("gpt2@1m")}, "x", sizes=["0.1m..1.6m"], budgets=["250k..4M"], flops="1e15"),
    ]
    for design in made:
        assert hash(design) == hash(copy.deepcopy(design)) and pickle.loads(pickle.dumps(design)) == design
    design = DESIGNS["named"]()
    changes = ("held['batch_size'] = 99", "held.update(batch_size=99)", "held.clear()", "held |= {1: 2}")
    for held in (design.recipe, design.arms[1].recipe):
        for change in changes:
            with pytest.raises(TypeError):
                exec(change, {"held": held})
    assert design == DESIGNS["named"]()


def test_fields_are_read_however_a_design_is_made(tmp_path: Path) -> None:
    """The constructor and `replace` take what `of` takes, and text means what it means on the command line."""
    made = gf.Design(arms=[A, B], data=tmp_path, tokens="1k", looks="3,5", power="1%")  # type: ignore[arg-type]
    assert (made.tokens, made.looks, made.power, made.data) == (1000, (3, 5), 0.01, str(tmp_path))
    assert made == gf.Design.of([A, B], str(tmp_path), tokens=1000, looks=[3, 5], power=0.01)
    assert made == made.replace(arms=[A, B], data=tmp_path, looks=(3, 5))
    assert gf.Design(arms=[A], tokens=1, looks=None) == gf.Design.of([A], tokens=1)  # type: ignore[arg-type]
    assert gf.Design.of([A], minutes="1.5", tune=True, within="30").replace(tune=False, within=None).minutes == 1.5
    with refused(code="missing", field="models"):
        gf.Design(arms=(), tokens=1)
    made.save(str(tmp_path))
    assert gf.Design.from_file(tmp_path / FILE) == made
    law = ScalingDesign.of(["gpt2"], sizes="0.1m..1.6m", budgets="250k..4M", flops="1e18", predict="30m,10b")
    assert (law.flops, law.predict) == ((1e18,), ((3e7, 1e10),))
    assert law.replace(flops=1e18, predict=[(3e7, "10b")]) == law


@pytest.mark.parametrize(
    ("models", "options", "code", "field"),
    [
        ([], {}, "missing", "models"),
        ("gpt2@1m", {}, "type", "models"),
        ([A, A], {}, "conflict", "models"),
        ({"a": A, 3: B}, {}, "type", "models"),
        ({"": A}, {}, "type", "models"),
        ([A] * 1001, {}, "range", "models"),
        ([7], {}, "type", "model"),
        (["lama@1m"], {}, "unknown", "name"),
        (["gpt2@1m", "gpt2@3m"], {}, "conflict", "allow_unmatched"),
        ([A, f"{B}+recipe.seed=1"], {}, "conflict", "recipe.seed"),
        ([f"{A}+context=64", B], {}, "conflict", "context"),
        ([A], {"minutes": 1.0}, "conflict", "budget"),
        ([A], {"tokens": None}, "conflict", "budget"),
        ([A], {"tokens": 1.5}, "type", "tokens"),
        ([A], {"tokens": "many"}, "type", "tokens"),
        ([A], {"tokens": True}, "type", "tokens"),
        ([A], {"steps": 3}, "conflict", "steps"),
        ([A], {"match": "minutes"}, "conflict", "match"),
        ([A], {"match": "size"}, "unknown", "match"),
        ([A], {"seeds": 0}, "range", "seeds"),
        ([A], {"seeds": "3"}, "type", "seeds"),
        ([A], {"seeds": 10**6}, "range", "seeds"),
        ([A], {"looks": 3}, "type", "looks"),
        ([A], {"looks": [1]}, "range", "looks"),
        ([A], {"looks": "3;5"}, "type", "looks"),
        ([A], {"power": 0.01}, "missing", "power"),
        ([A, B], {"power": "much"}, "type", "power"),
        ([A], {"tokens": None, "minutes": "long"}, "type", "minutes"),
        ([A], {"log_to": "nowhere"}, "unknown", "log_to"),
        ([A, B], {"power": 0.0}, "range", "power"),
        ([A], {"within": 3}, "conflict", "within"),
        ([A], {"tune": True, "seeds": 1}, "range", "seeds"),
        ([A], {"tune": True, "within": 0}, "range", "within"),
        ([A], {"tune": True, "learning_rate": 1e-3}, "conflict", "learning_rate"),
        ([f"{A}+recipe.learning_rate=1e-3"], {"tune": True}, "conflict", "recipe.learning_rate"),
        ([A, B], {"tune": True, "power": 0.1}, "conflict", "power"),
        ([A], {"tune": True, "pretrained": True}, "conflict", "pretrained"),
        ([A], {"tune": "yes"}, "type", "tune"),
        ([preset(A)], {"pretrained": True}, "type", "pretrained"),
        ([A], {"pretrained": True, "tokenizer": "byte"}, "conflict", "tokenizer"),
        ([A], {"log_to": ["nowhere"]}, "unknown", "log_to"),
        ([A], {"tokenizer": 3}, "type", "tokenizer"),
        ([A], {"batch_size": 0}, "range", "batch_size"),
        ([A], {"bach_size": 4}, "unknown", "bach_size"),
        ([A], {"objective": "seq2seq", "flops": 1e9, "tokens": None}, "conflict", "objective"),
    ],
)  # fmt: skip
def test_invalid_design_is_refused_when_made(models: Any, options: dict[str, Any], code: Code, field: str) -> None:
    fields = {name: value for name, value in {**PLAN, **options}.items() if value is not None}
    if "context" in str(models):
        del fields["context"]
    with refused(code=code, field=field):
        gf.Design.of(models, "x", **fields)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[1, 2]", "type"),
        ("models: [gpt2@1m]\ndata: x\ntokens: 1\nschema: 99", "schema"),
        ("models: [gpt2@1m]\ndata: x\ntokens: 1\nverb: steal", "unknown"),
        ("data: x\ntokens: 1", "missing"),
        ("1: 2", "type"),
        ("models: [gpt2@1m]\ndata: [x]\ntokens: 1", "type"),
        ("models: {a: {stack: 7}}\ndata: x\ntokens: 1", "missing"),
        ("models: !!python/object/apply:os.system ['true']\ndata: x", "syntax"),
        ("a: &a [1]\nmodels: *a", "syntax"),
        ("models: [" + "[" * 5000, "syntax"),
        ("x: " + "a" * MAX_FILE_BYTES, "range"),
    ],
    ids=range(11),
)
def test_a_hostile_file_is_refused_in_a_sentence(text: str, code: Code, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(RequestError) as caught:
        gf.Design.from_file(path)
    assert caught.value.code == code and "\n" not in str(caught.value)
    assert main(["run", str(path)]) == 2


# Carried out


def test_named_arms_and_configs_are_compared(source: Path, tmp_path: Path) -> None:
    found = gf.compare({"mine": preset(A), "base": B}, source, out=tmp_path / "out", executor=AT_ONCE, seeds=2, **PLAN)
    assert [run.key for run in found.runs] == [("mine", 0), ("base", 0), ("mine", 1), ("base", 1)]
    by_name = gf.compare([A, B], source, out=tmp_path / "other", executor=AT_ONCE, **PLAN)
    assert [run.config for run in found.runs[:2]] == [run.config for run in by_name.runs]
    assert [run.recipe for run in found.runs[:2]] == [run.recipe for run in by_name.runs]
    assert {verdict.a for verdict in found.verdicts} <= {"mine"} and found.folder == tmp_path / "out"


def test_the_folder_continues_from_its_design(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python and on the command line; more seeds are added, finished runs are kept."""
    out = tmp_path / "out"
    first = gf.compare({"mine": preset(A), "base": B}, source, out=out, executor=AT_ONCE, **PLAN)
    heard: list[Any] = []
    again = gf.compare(gf.Design.from_file(out / FILE), out=out, executor=AT_ONCE, progress=heard.append)
    assert again.results.runs == first.results.runs and sum(isinstance(one, Kept) for one in heard) == 2
    assert again.results.command == f"glassformer run {out / FILE}"
    monkeypatch.setattr("glassformer.runs.slurm.executor_of", lambda *asked: AT_ONCE)
    assert main(["run", str(out / FILE), "--seeds", "2"]) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    held = gf.Design.from_file(out / FILE)
    assert held.seeds == 2 and held.replace(seeds=1) == first.design
    assert main(["run", str(out / FILE), "--out", str(tmp_path / "copy")]) == 0
    assert gf.Design.from_file(tmp_path / "copy" / FILE) == held


def test_design_accepts_text_in_memory(source: Path, tmp_path: Path) -> None:
    """Tokens without a corpus can be trained on, and so compared on."""
    text = prepare(source, "char")
    bare = Tokens(text.tokenizer, text.train, text.validation, text.token_bytes)
    for data in (text, bare):
        out = tmp_path / type(data).__name__
        found = gf.compare([A], data, out=out, executor=AT_ONCE, **PLAN)
        held = gf.Design.from_file(out / FILE)
        assert held.data is None and found.results.command == f"glassformer run {out / FILE}"
        with refused(code="missing", field="data"):
            gf.compare(held, out=tmp_path / "none", executor=AT_ONCE)
        assert gf.compare(held, data, out=out, executor=AT_ONCE).runs == found.runs


def test_nothing_is_kept_without_a_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = gf.compare([A], source, executor=AT_ONCE, **PLAN)
    assert found.folder is None and found.runs[0].status == "ok" and list(tmp_path.iterdir()) == []


def test_a_comparison_is_a_value(source: Path, tmp_path: Path) -> None:
    found = gf.compare([A, B], source, out=tmp_path / "out", executor=AT_ONCE, seeds=2, **PLAN)
    frame = found.to_pandas()
    assert list(frame["loss"]) == [run.validation.loss for run in found.runs if run.validation]
    assert list(frame["name"]) == [A, B, A, B] and found.best is found.results.best
    page = found._repr_html_()
    assert A in page and len(found.verdicts) == 1 and "seeds" in page
    assert found.report(tmp_path / "page.html").read_text() == (tmp_path / "out" / "report.html").read_text()
    assert found.to_dict() == read_tree(tmp_path / "out" / "results.json")


class Losses(gf.Callback):
    """Keeps the losses of every run that it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[float]]] = []

    def started(self, run: Any) -> None:
        self.seen.append((run.recipe.seed, []))

    def after_update(self, run: Any, moment: Any) -> None:
        self.seen[-1][1].append(moment.loss)


def test_callbacks_see_every_run_of_a_comparison(source: Path, tmp_path: Path) -> None:
    """In this process, with the measures that separate processes find."""
    called, usual = Losses(), {"seeds": 2, **PLAN}
    found = gf.compare([A], source, out=tmp_path / "here", callbacks=[called], **usual)
    apart = gf.compare([A], source, out=tmp_path / "apart", **usual)
    assert [seed for seed, _ in called.seen] == [0, 1] and {len(losses) for _, losses in called.seen} == {6}
    assert called.seen[0][1] != called.seen[1][1]
    assert [run.validation for run in found.runs] == [run.validation for run in apart.runs]
    again = Losses()
    gf.compare([A], source, out=tmp_path / "here", callbacks=[again], **usual)
    assert again.seen == []  # the runs are kept


def test_a_run_in_this_process_that_fails_is_a_result(source: Path, tmp_path: Path) -> None:
    class Stops(gf.Callback):
        def after_update(self, run: Any, moment: Any) -> None:
            raise WorkError("the disk is full", code="disk")

    found = gf.compare([A], source, out=tmp_path, callbacks=[Stops()], **PLAN)
    assert (found.runs[0].status, found.runs[0].error) == ("failed", "the disk is full")
    with failed(code="failed"):
        found.check()


@pytest.mark.parametrize("verb", ["compare", "tune", "ablate", "scale"])
def test_callbacks_need_this_process(verb: str, source: Path, tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "compare": {"models": [A]}, "tune": {"models": [A, B]}, "ablate": {"base": A, "changes": "rope"},
        "scale": {"models": ["gpt2"], "sizes": "0.05m,0.1m,0.2m", "budgets": "16k,32k,65k"},
    }  # fmt: skip
    plan = (
        {name: value for name, value in PLAN.items() if name != "tokens"}
        if verb == "scale"
        else PLAN | {"tokens": 2048}
    )
    with refused(code="conflict", field="callbacks"):
        getattr(gf, verb)(
            data=source, out=tmp_path / "out", callbacks=[Losses()], executor=Local(), **asked[verb], **plan
        )
    with refused(code="type", field="callbacks"):
        getattr(gf, verb)(data=source, out=tmp_path / "out", callbacks=[print], **asked[verb], **plan)
    assert not (tmp_path / "out").exists()


# The command line

OPTIONS: dict[str, list[str]] = {
    "tokens": ["--tokens", "1768"], "minutes": ["--minutes", "1.5"], "flops": ["--flops", "1e9"],
    "steps": ["--steps", "9"],
    "match": ["--match", "flops"], "seeds": ["--seeds", "2"],
    "tokenizer": ["--tokenizer", "bpe:300"], "batch_size": ["--batch-size", "4"], "context": ["--context", "32"],
    "learning_rate": ["--lr", "3e-5"], "optimizer": ["--optimizer", "muon"], "objective": ["--objective", "prefix"],
    "device": ["--device", "cpu"], "dtype": ["--dtype", "float32"], "threads": ["--threads", "1"],
    "compile": ["--no-compile"], "allow_unmatched": ["--allow-unmatched"], "watch_every": ["--watch-every", "10"],
    "watch": ["--watch"], "seed": ["--seed", "7"],
    "on_spike": ["--on-spike", "skip"], "power": ["--power", "1%"], "looks": ["--looks", "3,5"],
    "pretrained": ["--pretrained"], "tune": ["--tune", "--seeds", "2"], "within": ["--tune", "--within", "3"],
}  # fmt: skip
"""Options of `compare` that change the design, each with another value than its default."""
OTHER = {"models", "data", "field", "json", "log_to", "workers", "slots", "executor", "out"}


@pytest.fixture
def designed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], gf.Design]:
    """The design that a command makes."""

    def of(words: list[str]) -> gf.Design:
        made: list[gf.Design] = []

        def begun(design: gf.Design, *_: Any, **__: Any) -> gf.Comparison:
            made.append(design)
            return gf.Comparison(Results(version=VERSION, data=Data({"name": ""}), budget=Budget(), runs=[]), design)

        monkeypatch.setattr(carrying, "begun", begun)
        assert main(["compare", "gpt2@1m", "llama@1m", "--data", "python-docs", *words]) == 0
        return made[0]

    return of


def test_every_option_of_compare_is_known_here() -> None:
    named = inspect.signature(verbs.compare).parameters.keys() - {"run", "trains"}
    shared = {field.name for kind in (options.RunOptions, options.ExecutorOptions) for field in fields(kind)}
    assert OPTIONS.keys() | OTHER == named | shared


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_in_the_design_and_its_file(option: str, designed: Callable[[list[str]], gf.Design]) -> None:
    budget = [] if option in ("minutes", "flops", "steps") else ["--tokens", "768"]
    given = OPTIONS[option] if option == "tokens" else [*budget, *OPTIONS[option]]
    design, plain = designed(given), designed(["--tokens", "768"])
    assert design != plain
    assert gf.Design.from_dict(yaml.safe_load(to_yaml(design.to_dict()))) == design


def test_a_choice_that_an_arm_undoes_is_in_the_notes() -> None:
    asked = gf.Design.of(["llama@0.3m", "llama@0.3m+gqa:1+mha"], "python-docs", steps=2)
    assert asked.notes[-1].startswith("llama@0.3m+gqa:1+mha: +mha undoes +gqa:1")


@pytest.mark.parametrize(("tokens", "expected"), [(1_000, 4096), (400_000, 4096), (10**6, 9259), (2 * 10**6, 16384)])
def test_evaluations_after_a_run_take_about_a_fiftieth_of_it(tokens: int, expected: int):
    design = gf.Design.of(["llama@1m", "gpt2@1m"], data="python-docs", tokens=tokens)
    assert design.common.evaluation_tokens == expected
    each = 6 * 0.36  # six times, at .36 of a training token's time
    assert each * expected <= max(0.02 * tokens, each * 4096)


def test_given_tokens_of_an_evaluation_are_obeyed_also_with_the_recipe_s_default():
    design = gf.Design.of(["llama@1m", "gpt2@1m"], data="python-docs", tokens=1_000, evaluation_tokens=16384)
    assert design.common.evaluation_tokens == 16384


def test_arms_with_equal_flops_are_measured_on_one_number_of_held_out_tokens():
    budget: dict[str, Any] = {"tokens": 50_000, "match": "flops"}
    design = gf.Design.of(["llama@1m", "gpt2@1m"], data="python-docs", **budget)
    plans = design.plans({name: preset(name) for name in ("llama@1m", "gpt2@1m")}, vocab_size=256)
    assert {plan.evaluation_tokens for plan in plans.values()} == {4096}
