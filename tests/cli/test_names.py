"""Names on the command line: refused at once, before torch is imported, and missing arguments named together."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from glassformer.architectures import PRESETS
from glassformer.cli import main, waiting
from glassformer.cli.program import GROUPS, VERBS
from glassformer.laboratory.evidence.catalogue import known as claims
from glassformer.lens.registry import READINGS
from glassformer.names import known
from glassformer.naming.catalogue import PresetCatalogue
from glassformer.naming.changes import OF_MODEL, words
from glassformer.parts.core.outside import is_outside
from glassformer.planning.machines import machines
from glassformer.text.corpora import ALIASES, EMBEDDED
from glassformer.text.tasks import TASKS
from glassformer.training.optimizers import OptimizerConfig

RUN = ["gpt2@1m", "--data", "python-docs", "--minutes", "1", "--out", "x"]
WITHOUT_TORCH = """
import sys
import time
sys.modules["torch"] = sys.modules["numpy"] = None  # an import raises ImportError
from glassformer.cli import main, waiting
sys.exit(main(sys.argv[1:]))
"""


def ended(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Returns the exit status and the standard error of the program in a process that cannot import torch."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, cwd=folder, timeout=60
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folders in which one file is missing."""
    top = tmp_path_factory.mktemp("names")
    for name, files in {
        "whole": ("config.json", "model.safetensors", "tokenizer.json"),
        "mute": ("config.json", "model.safetensors"), "light": ("config.json",), "bare": ("model.safetensors",),
        "old": ("pytorch_model.bin",), "empty": (),
    }.items():  # fmt: skip
        (top / name).mkdir()
        for file in files:
            (top / name / file).write_text("{}")
    (top / "deep").mkdir()
    (top / "deep" / "config.json").write_text('{"num_hidden_layers": 3}')
    key = b"llama.block_count"
    entry = len(key).to_bytes(8, "little") + key + (4).to_bytes(4, "little") + (3).to_bytes(4, "little")
    (top / "deep.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(8) + (1).to_bytes(8, "little") + entry)
    (top / "my.txt").write_text("a short text about cats and trees, which holds no weights\n")
    (top / "runs.csv").write_text("params,tokens,loss\n")
    return top


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "smollmm", "Hi"], "did you mean 'smollm2'"),
        (["generate", "gpt-2", "Hi"], "smollm2"),
        (["chat", "gpt2"], "hf:openai-community/gpt2"),
        (["generate", "hf:gpt2", "Hi"], "hf:openai-community/gpt2"),
        (["generate", "hf:bert-base-uncased", "Hi"], "hf:google-bert/bert-base-uncased"),
        (["generate", "not/there", "Hi"], "not/there"),
        (["generate", "wohle", "Hi"], "did you mean 'whole'"),
        (["inspect", "./wohle"], "did you mean 'whole'"),
        (["generate", "mute", "Hi"], "tokenizer.json"),
        (["generate", "light", "Hi"], "model.safetensors"),
        (["generate", "bare", "Hi"], "config.json"),
        (["generate", "old", "Hi"], "weights_only=True"),
        (["generate", "empty", "Hi"], "no config"),
        (["embed", "minillm", "Hi"], "did you mean 'minilm'"),
        (["ask", "Why?", "--index", "whole", "--model", "smolm2"], "did you mean 'smollm2'"),
        (["check", "lama@1m"], "did you mean 'llama'"),
        (["check", "llama@1m", "--reference", "not/there"], "not/there"),
        (["convert", "not/there", "out"], "not/there"),
        (["inspect", "rope"], "llama@10m+rope"),
        (["inspect", "xyzzy"], "known: gpt2, llama"),
        (["inspect", "llama@1m+roep"], "did you mean 'rope'"),
        (["inspect", "llama@1q"], "1q"),
        (["inspect", "llama@1m", "--diff", "gtp2"], "did you mean 'gpt2'"),
        (["plan", "llama-2-70b", "qwen3-8c"], "did you mean 'qwen3-8b'"),
        (["compare", "gpt2@1m", "lama@1m", "--data", "python-docs", "--minutes", "1"], "did you mean 'llama'"),
        (["train", "gpt2@1m", "--data", "python-doc", "--minutes", "1", "--out", "x"], "did you mean 'python-docs'"),
        (["ablate", "gpt2@1m", "--to", "lama", "--data", "python-docs"], "did you mean 'llama'"),
        (["generate", "whole", "--speculat"], "--speculate"),
        (["trian"], "train"),
        (["list"], 'Did you mean "presets"'),
        (["ls"], 'Did you mean "presets"'),
        (["models"], 'Did you mean "presets"'),
        (["eval", "whole"], 'Did you mean "inspect"'),
        (["finetune", "whole"], 'Did you mean "train"'),
        (["sample", "whole"], 'Did you mean "generate"'),
        (["run", "gpt2@1m"], "is the name of a model"),
        (["run", "nothere.yml"], "nothere.yml"),
        (["generate", "whole", "Hi", "--temp", "1"], "did you mean '--temperature'"),
        (["generate", "whole", "Hi", "--num-samples=2"], "did you mean '--n'"),
        (["generate", "whole", "Hi", "--topk", "2"], "did you mean '--top-k'"),
        (["train", *RUN, "--bs", "2"], "did you mean '--batch-size'"),
        (["train", *RUN, "--xyzzy", "2"], "glassformer train --help"),
        (["why", "mutee"], "did you mean 'mute'"),
        (["guides", "mathematic"], "did you mean 'mathematics'"),
        (["run", "nothere.yaml"], "nothere.yaml"),
        (["ask", "Why?", "--index", "not/there"], "index"),
        (["embed", "whole", "--file", "nothere.txt"], "nothere.txt"),
        (["generate", "whole", "--prompt-file", "nothere.txt"], "nothere.txt"),
        (["generate", "whole", "--prompts", "nothere.jsonl"], "nothere.jsonl"),
        (["train", *RUN, "--optimizer", "adamv"], "did you mean 'adamw'"),
        (["train", *RUN, "--tokenizer", "bbe:300"], "did you mean 'bpe'"),
        (["train", *RUN, "--device", "cdua:0"], "did you mean 'cuda'"),
        (["generate", "whole", "Hi", "--temperature", "-1"], "temperature=-1.0"),
        (["plan", "llama-3-8b", "--machine", "h10:8"], "did you mean 'h100'"),
        (["plan", "llama-3-8b", "--gpu", "abacus"], "known: h100, h200"),
        (["claims", "gqa-cach"], "did you mean 'gqa-cache'"),
        (["claims", "gqa-cache", "switch-los", "--quick"], "did you mean 'switch-loss'"),
        (["scale", "gpt2", "--data", "python-doc", "--sizes", "1m", "--budgets", "1M"], "did you mean 'python-docs'"),
        (["scale", "lama", "--data", "python-docs", "--sizes", "1m", "--budgets", "1M"], "did you mean 'llama'"),
        (["scale", "--data", "runs.csw"], "did you mean 'runs.csv'"),
        (["inspect", "whole", "Hi", "--reading", "head_score"], "did you mean 'head_scores'"),
        (["inspect", "whole", "Hi", "--ablate", "layers.1.head.2"], "layers.2.heads.1,3"),
        (["inspect", "deep", "Hi", "--ablate", "layers.1", "--ablate", "layers.3.ffn"], "layers 0 to 2"),
        (["inspect", "deep.gguf", "Hi", "--ablate", "layers.3"], "layers 0 to 2"),
        (["inspect", "llama@10m", "--ablate", "layers.1"], "give the text"),
        (["chat", "whole", "--top-p", "0"], "top_p=0.0"),
        (["generate", "whole", "Hi", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["generate", "whole"], 'generate MODEL "TEXT"'),
        (["generate", "my.txt", "Hi"], "name a folder with config.json"),
        (["convert", "my.txt", "out"], "name a folder with config.json"),
        (["train", "gpt2@1m", "--data", "my.txt", "--steps", "1", "--out", "x", "--context", "20k"], "context=20000"),
        (["compare", "gpt2@1m", "--data", "my.txt", "--steps", "1", "--context", "20k"], "context=20000"),
        (["serve", "whole", "--ctx", "16q"], "16q"),
    ],
)  # fmt: skip
def test_mistyped_name_is_refused_without_torch(arguments: list[str], says: str, folder: Path) -> None:
    status, error = ended(arguments, folder)
    assert (status, len(error.splitlines())) == (2, 1) and says in error, error


def test_a_missing_library_of_the_server_is_named_without_torch(folder: Path) -> None:
    hidden = WITHOUT_TORCH.replace('= sys.modules["numpy"]', '= sys.modules["numpy"] = sys.modules["starlette"]')
    typed = [sys.executable, "-c", hidden, "serve", "whole", "--ctx", "16k", "--json"]
    done = subprocess.run(typed, capture_output=True, text=True, cwd=folder, timeout=60)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["field"]) == (2, "missing", "starlette")


def test_help_on_a_terminal_starts_without_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(waiting, "begin", heard.append)
    for typed in (["help", "train"], ["train", "--help"], ["train", "-h"]):
        main(typed)
    assert "Usage:" in capsys.readouterr().out and not heard


@pytest.mark.parametrize("arguments", [[], ["help"], ["help", "train"], ["--help"], ["train", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments: list[str], folder: Path) -> None:
    assert ended(arguments, folder) == (0, "")


def test_known_names_are_those_that_are_declared() -> None:
    own = [word.name for axis in words().values() for word in axis]
    declared = [one for one in own if one in known.SHORT_NAMES or one in OF_MODEL]
    assert list(PRESETS) == known.PRESETS
    assert set(known.FAMILIES.values()) <= set(PRESETS)
    assert sorted(known.SHORT_NAMES) == sorted(declared)
    assert (*EMBEDDED, *ALIASES) == known.CORPORA
    assert tuple(TASKS) == known.TASKS
    ours = {kind for kind, one in OptimizerConfig.choices().items() if not is_outside(one)}
    assert sorted(ours) == list(known.OPTIMIZERS)
    assert tuple(READINGS) == known.READINGS
    assert tuple(machines()) == known.MACHINES
    assert sorted(claims()) == sorted(known.CLAIMS)
    assert [torch.device(kind).type for kind in known.DEVICES[1:]] == list(known.DEVICES[1:])


def test_every_short_name_of_the_package_is_known() -> None:
    """In a process without parts from outside."""
    program = "from glassformer.naming.changes import changes; print(*changes())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == known.SHORT_NAMES


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["train"], ["MODEL", "--data", "--out", "--minutes"]),
        (["train", "gpt2@1m"], ["--data", "--out", "--minutes"]),
        (["train", "gpt2@1m", "--data", "python-docs", "--out", "x"], ["--minutes"]),
        (["compare"], ["MODELS", "--data", "--minutes"]),
        (["convert"], ["SOURCE", "OUT"]),
        (["index"], ["DATA", "--out"]),
        (["ask"], ["QUESTION", "--index"]),
    ],
)
def test_missing_arguments_are_named_together_with_an_example(
    arguments: list[str], missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 2
    out, error = capsys.readouterr()
    told, example = error.split("; for example: ")
    assert all(name in told for name in missing)
    assert example.strip() == f"glassformer {VERBS[arguments[0]].example}"
    assert json.loads(out)["error"]["code"] == "missing"


@pytest.mark.parametrize(
    "words", [["presets", "rope", "x"], ["convert", "smollm2", "a", "b"], ["chat", "gpt2", "a", "b"]]
)
def test_surplus_word_is_named_with_the_commands_arguments(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{words[-1]} is not used: {words[0]} takes" in error and "Token" not in error


def test_stray_field_of_the_recipe_is_refused_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "gpt2@0.1m", "--data", "x", "--steps", "3", "--out", "y", "recipe.learning_rate=6e-3"]
    assert main([*command, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "arguments" and "--lr 6e-3" in json.dumps(error)


def test_presets_are_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "qwen3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["presets"] and all("qwen3" in name for name in found["presets"])
    assert main(["presets", "rope"]) == 0
    shown = capsys.readouterr().out
    assert "+rope" in shown and "+alibi" not in shown
    assert main(["presets", "roep"]) == 2
    assert "did you mean 'rope'" in capsys.readouterr().err


def test_every_verb_has_an_example_that_names_it() -> None:
    assert all(verb.example.split()[0] == name for name, verb in VERBS.items())
    assert next(iter(GROUPS)) == "Start here" and next(iter(VERBS)) == "train"


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (errno.EACCES, 2, "disk"),
        (errno.EROFS, 2, "disk"),
        (errno.ENOENT, 2, "disk"),
        (errno.ENOSPC, 1, "disk"),
        (errno.EIO, 1, "disk"),
    ],
)
def test_an_error_of_the_system_has_one_form_and_one_status(
    number: int, status: int, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it comes from: a config that may not be read, a folder that may not be written."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "a/file")

    monkeypatch.setattr(PresetCatalogue, "of", refuse)
    assert main(["presets", "--json"]) == status
    out, error = capsys.readouterr()
    found = json.loads(out)["error"]
    assert (found["code"], found["message"]) == (code, error.removeprefix("glassformer: ").strip())
    assert "a/file" in error and os.strerror(number) in error and len(error.splitlines()) == 1


def test_a_wait_is_shown_on_a_terminal_and_taken_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words and seconds while nothing else is shown; nothing in a file or a pipe."""
    monkeypatch.setattr(waiting, "SOON", 0.0)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    waiting.begin("loading")
    time.sleep(0.1)
    waiting.end()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    waiting.begin("loading")
    time.sleep(0.3)
    waiting.end()
    shown = capsys.readouterr().err
    assert shown.count("\rloading ... ") > 1 and shown.endswith("\r\x1b[2K")
    waiting.begin("again")
    assert main(["presets", "nothing-of-this-name"]) == 2
    assert capsys.readouterr().err.rsplit("\x1b[2K")[-1].startswith("glassformer: ")
