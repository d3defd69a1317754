"""Recipes: files that are checked whole before anything runs, and what they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from glassformer.cli import main
from glassformer.comparison.design import FILE, Design
from glassformer.comparison.single import SingleRun
from glassformer.errors import Code
from glassformer.laboratory.experiments import steps_of
from glassformer.laboratory.ladder import LadderDesign
from tests.refused import refused

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
TINY: dict[str, Any] = {"batch_size": 2, "context": 16, "threads": 1, "dtype": "float32"}
SMALLER = "+layers=1+d_model=16+heads=4+head_dim=4"


def written(folder: Path, *steps: dict[str, Any], **fields: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"about": "a test", "steps": list(steps), **fields}))
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_designs(path: Path) -> None:
    about, steps = steps_of(str(path), seeds=7)
    assert about and all(step.out.startswith("runs/") for step in steps)
    names = [step.out for step in steps]
    for step in steps:
        if "uptraining" in step.out and step.verb == "compare":
            continue  # an earlier step trains the weights of its arms
        made = step.made()
        assert isinstance(made, SingleRun) or made.to_dict()["seeds"] == 7, names


@pytest.mark.parametrize(
    ("step", "code", "field"),
    [
        ({"verb": "compair"}, "unknown", "verb"),
        ({"verb": "compare", "models": ["gpt2@1m"], "data": "x", "token": "1M"}, "unknown", "token"),
        ({"verb": "compare", "models": ["gpt2@1m"], "data": "x", "seeds": "many"}, "type", "seeds"),
        ({"verb": "compare", "models": ["gpt2@1m"], "data": {"a": 1}}, "type", "data"),
        ({"verb": "compare", "models": ["gpt2@1m"], "data": "x", "json": True}, "unknown", "json"),
        ({"verb": "compare", "models": ["gpt2@1m"], "data": "x", "out": 3}, "type", "out"),
        ({"verb": "train", "model": ["gpt2@1m"], "data": "x"}, "missing", "model"),
        ({"verb": "scale", "models": ["gpt2"], "data": "x"}, "missing", "sizes"),
        ({"verb": "ablate", "base": "gpt2@1m", "data": "x", "tokens": 1}, "missing", "to"),
    ],
)
def test_invalid_recipe_is_refused_before_its_first_step(
    step: dict[str, Any], code: Code, field: str, tmp_path: Path
) -> None:
    with refused(code=code, field=field):
        steps_of(written(tmp_path, step))
    with refused(code="unknown", field="abuot"):
        steps_of(written(tmp_path, {"verb": "train", "model": "gpt2@1m"}, abuot="x"))
    with refused(code="conflict", field="seeds"):
        steps_of(
            written(tmp_path, {"verb": "train", "model": "gpt2@1m", "data": "x", "out": "y", "tokens": 1}),
            seeds=2,
        )


@pytest.mark.parametrize("budget", [{"tokens": "1M"}, {"minutes": 1.0}, {"flops": 1e15}, {"steps": 30}])
@pytest.mark.parametrize("kind", [Design, LadderDesign])
def test_a_design_of_any_budget_is_run_from_its_file(kind: Any, budget: dict[str, Any], tmp_path: Path) -> None:
    ends = {"models": ["gpt2@1m"]} if kind is Design else {"base": "gpt2@1m", "changes": "rope"}
    design = kind.of(**ends, data="text.txt", **budget)
    design.save(tmp_path)
    about, (step,) = steps_of(tmp_path / FILE)
    assert (about, step.made(), step.out) == ("", design, str(tmp_path))


def tiny(step: dict[str, Any], text: Path, out: Path) -> dict[str, Any]:
    """Returns the step with a model, a budget and a folder that take seconds."""
    made = {key: value for key, value in step.items() if key not in ("tune", "watch", "budgets", "sizes", "tokens")}
    budget = {"steps": 2} if "steps" in step else {"tokens": 320}
    if step["verb"] == "scale":
        budget = {"sizes": "10k,20k,40k", "budgets": "64,128,256"}
    where = str(out / Path(step["out"]).name)
    if step["verb"] == "compare" and "pretrained" in step:
        made["models"] = [name.replace("runs/uptraining", str(out)) for name in step["models"]]
    own = {"seeds": 2} if "seeds" in step else {}
    own |= {} if step["data"] == "induction" else {"data": str(text)}
    row = {"data": "induction:row=16,least=2,most=4", "context": 16} if step["data"] == "induction" else {}
    return {**made, **TINY, **budget, **own, **row, "out": where}


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_tiny_form_runs_and_resumes(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    steps = [tiny(step, text, tmp_path) for step in yaml.safe_load(path.read_text())["steps"]]
    for _ in range(2):
        assert main(["run", written(tmp_path, *steps), "--json"]) == 0
        assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == len(steps)
    for step in steps:
        assert any(Path(step["out"]).iterdir())
