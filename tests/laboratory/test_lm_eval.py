"""`lm-eval` on our models: its own `hf`, with the same weights, is the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.naming import preset
from glassformer.text import BPETokenizer, CharTokenizer, Tokenizer, prepare
from tests.refused import refused

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("accelerate", reason="lm-eval's own `hf` needs accelerate")
pytest.importorskip("transformers")

TEXT = "the cat sat on the mat. the dog ate the big red hat and ran. "
WORDS = TEXT.replace(".", "").split()
MODELS = {"llama": "llama@1m+gqa:1", "glassformer": "gpt2@1m+alibi+rmsnorm+swiglu"}


def saved(folder: Path, expression: str, tokenizer: Tokenizer) -> str:
    """A folder with a model that has an opinion."""
    tiny = f"layers=2+d_model=16+heads=2+vocab_size={tokenizer.vocab_size}+context=40"
    model = preset(f"{expression}+{tiny}").build(seed=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() == 2 else 1)
    return gf.save(model, tokenizer, folder).model_type


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer = BPETokenizer.train([TEXT * 30], 280)
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, expression in MODELS.items():
        assert saved(made[name], expression, tokenizer) == name
    return made


def asked(*rows: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=row, task_name="test") for row in rows]


def ours(path: Path, **options: Any) -> Any:
    from glassformer.laboratory.lm_eval import GlassformerLM

    return GlassformerLM(str(path), **options)


def theirs(path: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    import glassformer.conversion.transformers  # noqa: F401

    return HFLM(str(path), device="cpu", **options)


CHOICES = asked(
    *((" ".join(WORDS[i : i + i % 6 + 1]), " " + " ".join(WORDS[: 1 + i % 3])) for i in range(9)),
    ("", "the cat"),
    ("the cat ", "sat"),
    (TEXT * 4, " the dog"),  # longer than the context
    ("<|endoftext|>the", " dog"),
)
ROLLING = asked((TEXT * 5,), ("the",), (TEXT,))
QUESTIONS = asked(
    *(
        (" ".join(WORDS[i : i + 3]), {"until": stop, "max_gen_toks": 12})
        for i, stop in enumerate((["."], "t", [], ["he", "d"]))
    )
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_equal_those_of_hf(name: str, batch_size: int, folders: dict[str, Path]):
    mine, other = ours(folders[name], batch_size=batch_size), theirs(folders[name], batch_size=batch_size)
    for answer, expected in zip(
        mine.loglikelihood(CHOICES), other.loglikelihood(CHOICES, disable_tqdm=True), strict=True
    ):
        assert answer[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-4)
        assert answer[1] == expected[1]
    expected = other.loglikelihood_rolling(ROLLING, disable_tqdm=True)
    assert mine.loglikelihood_rolling(ROLLING) == pytest.approx(expected, rel=1e-5)
    assert mine.generate_until(QUESTIONS) == other.generate_until(QUESTIONS, disable_tqdm=True)


TASK = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of six questions, for --include_path."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"question": " ".join(WORDS[i : i + 4]), "label": i % 3,
             "choices": [" " + " ".join(WORDS[j : j + 2]) for j in range(i, i + 3)]} for i in range(6)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "choice.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    return tmp_path


def accuracy(results: dict[str, Any]) -> list[float]:
    return [results["results"]["choice"][f"{metric},none"] for metric in ("acc", "acc_norm")]


@pytest.mark.parametrize("name", MODELS)
def test_user_task_gives_the_accuracy_of_transformers(name: str, folders: dict[str, Path], task: Path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task), include_defaults=False)
    asked = {"tasks": ["choice"], "task_manager": manager, "bootstrap_iters": 0}
    path = folders[name]
    import glassformer.laboratory.lm_eval  # noqa: F401

    mine = simple_evaluate(model="glassformer", model_args=f"path={path}", batch_size=2, **asked)
    other = simple_evaluate(model=theirs(path), **asked)
    assert accuracy(mine) == accuracy(other)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glassformer --model_args path=", "hf --device cpu --model_args pretrained="])
def test_the_command_of_the_manual(model: str, folders: dict[str, Path], task: Path):
    command = f"-m glassformer.laboratory.lm_eval --model {model}{folders['glassformer']} --tasks choice"
    where = ["--include_path", str(task), "--output_path", str(task / "out")]
    done = subprocess.run(
        [sys.executable, *command.split(), *where], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "|choice|" in done.stdout.replace(" ", "")


def test_a_run_folder_and_letters(tmp_path: Path):
    """A run as `train` leaves it; its tokenizer has no special tokens at all."""
    (tmp_path / "text.txt").write_text(TEXT * 200)
    config = preset("gpt2@1m+alibi+layers=1+d_model=16+heads=2+context=32")
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    gf.train(config, text, {"tokens": 2000, "batch_size": 8, "context": 32}, out=tmp_path / "run")
    mine = ours(tmp_path / "run", prefix_token_id=0)
    ((likely, _),) = mine.loglikelihood(asked(("the", " cat")))
    loaded = gf.load(tmp_path / "run")
    tokens = torch.tensor([loaded.tokenizer.encode("the cat").tolist()])
    losses = loaded.model.loss(tokens[:, :-1], tokens[:, 1:], reduction="none")
    assert likely == pytest.approx(-float(losses[0, -4:].sum().detach()), rel=1e-5)


def test_refusals(folders: dict[str, Path], tmp_path: Path):
    path = folders["llama"]
    with refused(code="range", field="batch_size"):
        ours(path, batch_size="auto")
    with refused(code="unknown", field="dtype"):
        ours(path, dtype="int7")
    with refused(code="range", field="max_gen_toks"):
        ours(path).generate_until(asked(("the", {"until": ["."]})))
    with refused(code="missing", field="tokenizer.chat_template"):
        ours(path).apply_chat_template([{"role": "user", "content": "hello"}])
    gf.save(gf.load(path).model, None, tmp_path / "mute")
    with refused(code="missing", field="tokenizer"):
        ours(tmp_path / "mute")
    letters = CharTokenizer(set(TEXT))
    saved(tmp_path / "letters", "gpt2@1m", letters)
    with refused(code="missing", field="prefix_token_id"):
        ours(tmp_path / "letters").loglikelihood(asked(("", "the")))
    saved(tmp_path / "both", "gpt2@1m+bidirectional", letters)
    with refused(code="causal", field="model"):
        ours(tmp_path / "both")
