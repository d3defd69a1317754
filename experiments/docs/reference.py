"""The pages of docs/reference: verbs, expressions, models, Python, files and errors, each made of its source.

>>> python -m experiments.docs reference            # all of them; outputs of examples stay as they were
>>> python -m experiments.docs.reference train      # runs the example of a verb again, or of all without a name
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import glassformer as gf
from experiments.docs import DOCS, escaped, http, plainly
from experiments.docs.guides import table
from experiments.docs.site import children, first_sentence
from glassformer.architectures import PRESETS
from glassformer.cli.program import GROUPS, VERBS, Verb, app, described
from glassformer.conversion.families import FAMILIES
from glassformer.errors import CODES
from glassformer.files import SCHEMAS
from glassformer.names.explained import texts
from glassformer.names.known import FAMILIES as PRESET_OF
from glassformer.names.sizes import SIZES
from glassformer.naming.changes import words
from glassformer.naming.models import preset
from glassformer.runs import events, results
from glassformer.training import progress

NAME = "reference"
FOLDER = DOCS / "reference"
MADE = "<!-- `python -m experiments.docs reference` writes this page. -->\n\n"
EXAMPLE = "## Example"
LONGEST = 60
"""Lines of an example's output that a page shows at most."""

EXAMPLES: dict[str, list[str]] = {
    "train": ["train llama@0.1m --data python-docs --tokens 60k --out my_run"],
    "generate": ['generate my_run "The function" --max-new-tokens 30 --seed 0'],
    "chat": ['chat smollm2 "Name a colour of the sky." --max-new-tokens 20 --seed 0'],
    "inspect": ["inspect llama@1m+gqa:2 --diff gpt2@1m"],
    "compare": ["compare gpt2@0.1m llama@0.1m --data python-docs --tokens 60k --out comparison"],
    "convert": ["convert my_run my_folder"],
    "check": ["check my_folder"],
    "embed": ['embed minilm "a cat on a mat" "a dog in the fog"'],
    "classify": [
        "train bert@0.1m+classes:2 --data reviews.jsonl --tokens 40k --context 32 --out judge",
        'classify judge "a splendid evening"',
    ],
    "index": ["index notes.txt --out my_index"],
    "ask": ['ask "When does the library open?" --index my_index'],
    "tokens": ['tokens "The cat sat" --with byte,word,smollm2'],
    "ablate": ["ablate gpt2@0.1m --to gpt2@0.1m+rope+rmsnorm --data python-docs --tokens 50k --seeds 2 --out ladder"],
    "scale": ["scale --data runs.csv --predict 2b,100b"],
    "run": ["run comparison/design.yaml"],
    "serve": ["serve smollm2 --dry --quantize none"],
    "studio": ["studio llama@10m+gqa:2 --dry"],
    "why": ["why my_run"],
    "schema": ["schema | head -20"],
}
"""Commands of the example where the verb's own takes long; the output shown is that of the last."""

FILES: dict[str, dict[str, str]] = {
    "A run folder": {
        "config.yaml": "The model: the tree of parts. `glassformer schema` prints its JSON Schema.",
        "recipe.yaml": "Optimizer, schedule, batch, length and everything else that training depends on.",
        "tokenizer.json, tokenizer_config.json, glassformer_tokenizer.json": "The tokenizer; the last one if it is of "
        "characters, bytes or words.",
        "metrics.jsonl": "A line for each step and each validation: see [metrics.jsonl](#metrics-jsonl).",
        "dynamics.jsonl": "With `--watch`, statistics by layer and head: keys are STATISTIC/WHERE.",
        "checkpoints/step_N/, latest": "Weights (safetensors), optimizer state and generator states; `latest` names "
        "the one that is used.",
        "report.html": "The page of the run; opens offline.",
        "pretrained.json": "Fingerprint of the weights that training started from, if there were any.",
        "sources.json": "Files of parts from outside the package, with their SHA-256.",
        "command.txt": "The command that repeats the run.",
    },
    "A comparison": {
        "design.yaml": "The experiment; `glassformer run` repeats it, `gf.Design.from_file` reads it.",
        "results.json": "`schema`, `created`, `status`, `command`, `again` (the command from any folder), `data`, "
        "`budget`, `machine`, `asked`, `runs`, a list of [RunResult](#runresult), `verdicts`, `looks`, "
        "`planned_looks`, and `speeds`, tokens/s of each model if they were measured after runs side by side.",
        "report.html": "The report; opens offline.",
        "runs/NAME-seedN/": "For each model and seed: request.json, result.json (a [RunResult](#runresult)), "
        "stderr.txt, and run/, its run folder, without command.txt and report.html.",
        "tokenizer/": "The tokenizer that all runs share.",
    },
    "Other experiments": {
        "ladder.json": "`glassformer ablate`: base, target, and the rungs with effects and intervals.",
        "scaling.json": "`glassformer scale`: runs, fitted laws with intervals, the prediction.",
    },
    "Models and texts": {
        "a Hugging Face folder": "config.json, model.safetensors (sharded when large), tokenizer files, README.md.",
        "FILE.gguf": "One file for llama.cpp: config, tokenizer and weights; f32, f16, bf16 or q8_0.",
        "an index": "passages.jsonl, vectors.npy and index.json, written by `glassformer index`.",
        "a prompt cache": "The decode state of a prompt, in safetensors, written by `--state FILE`.",
    },
}
"""Files that the program writes, with their content."""

SHOWN_MODELS = {
    "metrics.jsonl": (progress._Taken, progress._Skipped, progress._Validated),
    "RunResult": (results.RunResult, results.TrainingResult, results.Validation, results.Generation, results.Answers,
                  results.Reach, results.Dynamics),
    "Events of --json": tuple(events.Event.__args__),
}  # fmt: skip
"""Types of files and lines, by the heading of their section."""


def pages() -> dict[Path, str]:
    """Returns every page with its text; outputs of examples are those that the pages have."""
    found = {FOLDER / "cli.md": cli_index()}
    found |= {cli_path(name): cli_page(name, output_before(name)) for name in VERBS}
    found[FOLDER / "expressions.md"] = expressions_page()
    found[FOLDER / "models.md"] = models_page()
    found[FOLDER / "api.md"] = api_index()
    found |= {api_path(name): api_page(name) for name in api_names()}
    found[FOLDER / "files.md"] = files_page()
    found[FOLDER / "errors.md"] = errors_page()
    found[FOLDER / "http.md"] = http.page(MADE)
    found |= {DOCS / f"{name}.md": list_page(name) for name in LISTS}
    return found


def write() -> None:
    """Writes every page."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# Verbs


def cli_path(verb: str) -> Path:
    """Returns the path of a verb's page."""
    return FOLDER / "cli" / f"{verb}.md"


def cli_index() -> str:
    """Returns the page that lists the verbs."""
    pieces = [
        f"{MADE}# Command line",
        "`glassformer VERB --help` prints what these pages say. Every verb takes `--json`, which prints the result for "
        "programs, and `--import FILE.py`, which makes the parts in that file known. "
        "Exit status: see [errors](errors.md).",
    ]
    for heading, verbs in GROUPS.items():
        pieces += [f"## {heading}", table(("verb", "purpose"), (_listed(name, verb) for name, verb in verbs.items()))]
    return "\n\n".join(pieces) + "\n"


def _listed(name: str, verb: Verb) -> tuple[str, str]:
    return f"[{name}](cli/{name}.md)", escaped(verb.line)


def cli_page(verb: str, output: str) -> str:
    """Returns the page of a verb: its help, and an example with its output."""
    with described([verb]):
        text = app[verb].generate_docs(output_format="markdown", heading_level=1)
    text = re.sub(rf"```console\n{verb} ", f"```console\nglassformer {verb} ", text)
    text = re.sub(r"\n {4,}", " ", text).replace("<", "\\<")
    commands = "\n".join(f"glassformer {line}" for line in EXAMPLES.get(verb, [VERBS[verb].example]))
    pieces = [MADE + text.strip(), EXAMPLE, f"```bash\n{commands}\n```"]
    if output:
        pieces.append(f"```text\n{output}\n```")
    if others := VERBS[verb].others:
        pieces.append(f"Other names that lead here: {', '.join(others)}.")
    return "\n\n".join(pieces) + "\n"


def output_before(verb: str) -> str:
    """Returns the output that the verb's page shows, or ""."""
    path = cli_path(verb)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    match = re.search(rf"{EXAMPLE}\n.*?```text\n(.*?)\n```", text, re.DOTALL)
    return match[1] if match else ""


TEXTS = {
    "notes.txt": "The library opens at nine in the morning and closes at six. On Sundays it stays closed.\n\n"
    "Books are lent for three weeks. A book that another reader asks for cannot be lent again.\n",
    "runs.csv": "params,tokens,loss\n"
    + "".join(
        f"{n:.3g},{d:.3g},{1.69 + 406.4 / n**0.34 + 410.7 / d**0.28:.4f}\n"
        for n in (1e7, 3e7, 1e8, 3e8, 1e9)
        for d in (3e8, 1e9, 3e9, 1e10, 3e10)
    ),
    "reviews.jsonl": "".join(
        f'{{"text": "{mood} {thing}", "label": "{label}"}}\n'
        for label, moods in (("good", ("a splendid", "a fine", "a lovely")), ("bad", ("a dull", "a poor", "a sad")))
        for mood in moods
        for thing in ("evening", "film", "book", "play", "meal", "song", "day", "story")
    ),
}
"""Files that examples read."""


def run_examples(verbs: list[str]) -> None:
    """Runs the examples of verbs in one folder and writes their pages; an example may need those before it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in TEXTS.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        for verb in VERBS:
            if verb in verbs:
                output = ""
                for line in EXAMPLES.get(verb, [VERBS[verb].example]):
                    output = _output(line, folder)
                cli_path(verb).write_text(cli_page(verb, output), encoding="utf-8")
                print(f"{verb}: {len(output.splitlines())} lines", flush=True)


def _output(line: str, folder: str) -> str:
    """Returns what a command prints in a terminal of 100 columns, cut to LONGEST lines."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    done = subprocess.run(
        f"glassformer {line}", shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"glassformer {line}: exit status {done.returncode}\n{done.stderr}")
    printed = done.stdout.replace(f"{folder}/", "").replace(f"{DOCS.parent}/", "")
    lines = [one.rstrip() for one in printed.splitlines()]
    if len(lines) > LONGEST:
        lines = [*lines[: LONGEST - 1], f"... ({len(lines) - LONGEST + 1} more lines)"]
    return "\n".join(lines).strip("\n")


# Expressions and models

GRAMMAR = """\
EXPR   := NAME[@SIZE][+CHANGE...]        llama@10m+gqa:2
NAME   := a preset or a family: gpt2, llama-7b, qwen3, ...          see models
        | FILE.yaml, FILE.json           a config
        | RUN                            a run folder
        | FOLDER                         a Hugging Face folder, or one of Meta or Mistral (params.json)
        | FILE.gguf | ckpt.pt            a file of llama.cpp; of nanoGPT
        | hf:OWNER/NAME                  a model of the Hugging Face hub
        | smollm2 | minilm               real weights from a Python package
SIZE   := 10m, 1.5b, ...                 parameters of the layers, without embeddings; sets layers, width and heads
CHANGE := WORD[:VALUE]                   a short name: +rope, +gqa:2
        | PATH=VALUE                     any field: +norm.eps=1e-6, +layers=8, +stack.0.blocks.0.ffn.hidden=1024
        | recipe.FIELD=VALUE             a field of the recipe of one arm: +recipe.optimizer=muon
DATA   := FILE.txt | FOLDER | FILE.jsonl[,column=FIELD] | -         a text, a folder of them, JSON lines, stdin
        | python-docs | python-source    texts that every Python installation has
        | shakespeare | wikitext-2       fetched, or a file that is named
        | hf:OWNER/NAME | hf:FOLDER      a dataset
        | train.bin | FILE.npy           token ids
        | gettext:LANGUAGE               messages of the programs on this machine, and their translations
        | pairs:numbers | pairs:dates | pairs:reversal              generated, with exact answers
        | induction | selective-copy | icl-regression [:FIELD=VALUE,...]                 tasks, drawn by a seed"""


def expressions_page() -> str:
    """Returns the page of the grammar and of every short name."""
    pieces = [
        f"{MADE}# Expressions",
        "An expression names a model. The same text builds, trains, loads, counts and compares it, on the command line "
        "and in Python.",
        f"```text\n{GRAMMAR}\n```",
        "Changes are applied from left to right; a change that undoes an earlier one, or a choice of the preset, is "
        "reported. A folder does not hide what names a model; `./NAME` is the folder. A vocabulary larger than the "
        "tokenizer's is padded. How texts and token ids are read: [data](../data.md).",
        f"Sizes: {', '.join(f'`@{name}`' for name in SIZES)}, and any number between them, such as `@2.5m`.",
    ]
    explained = texts()
    for axis, some in words().items():
        # A part of a user's module has no text; a text of a kind explains no word.
        own = [one for one in some if one.name in explained and "kind" not in explained[one.name]]
        rows = [(f"`+{one}`".replace("|", "\\|"), escaped(str(explained[one.name]["what"]))) for one in own]
        if rows:
            pieces += [f"## {axis.replace('_', ' ').capitalize()}", table(("change", "meaning"), rows)]
    return "\n\n".join(pieces) + "\n"


def models_page() -> str:
    """Returns the page of presets and of checkpoint families."""
    shown_as = {published: family for family, published in PRESET_OF.items()}
    rows = []
    for name in PRESETS:
        config = preset(name)
        width = f"{config.d_model:,}"
        rows.append((f"`{name}`", f"{config.num_params():,}", str(config.n_layers), width, shown_as.get(name, "")))
    checkpoints = [
        (family.model_type, family.architecture, "yes" if family.gguf else "")
        for family in sorted(FAMILIES.values(), key=lambda one: one.model_type)
    ]
    pieces = [
        f"{MADE}# Models",
        f"There are {len(PRESETS)} presets of published models; parameter counts are exact. A family name gives a "
        "model's wiring another size: `llama@10m`. `glassformer inspect NAME` shows the parts, `glassformer plan NAME` "
        "the costs.",
        table(("preset", "parameters", "layers", "width", "family name"), rows),
        "## Checkpoints",
        f"Weights of {len(checkpoints)} families of `config.json` load and are saved again bit for bit; logits and "
        "gradients equal those of the Hugging Face classes ([measured](../benchmarks/parity.md)). GGUF files load and "
        "are written if the table has a yes.",
        table(("model_type", "class", "GGUF"), checkpoints),
        "Also read: nanoGPT's `ckpt.pt`, the folders of Meta and Mistral (`params.json`, `consolidated.*`), "
        "`pytorch_model.bin`, and folders of sentence-transformers. Files are never unpickled.",
    ]
    return "\n\n".join(pieces) + "\n"


# Python


def api_names() -> list[str]:
    """Returns the public names that have a page: functions and classes."""
    return sorted((name for name in gf.__all__ if name != "__version__" and callable(getattr(gf, name))), key=str.lower)


def api_path(name: str) -> Path:
    """Returns the path of a public name's page. Classes have a suffix, since file systems may ignore case."""
    return FOLDER / "api" / f"{name}{'_class' if inspect.isclass(getattr(gf, name)) else ''}.md"


def api_index() -> str:
    """Returns the page that lists the public names."""
    pieces = [
        f"{MADE}# Python",
        "`import glassformer as gf` gives everything below; it imports torch when a name is first used. Each verb of "
        "the command line is a function with the same options. The pages of functions have their "
        "text on the site; `help(gf.compare)` prints the same. Readings are in [gf.lens and gf.dynamics]"
        "(../under_glass.md), parts in [architecture](../architecture.md).",
    ]
    for heading, of_classes in (("Functions", False), ("Classes", True)):
        rows = [
            (f"[`gf.{name}`](api/{api_path(name).name})", plainly(_summary(getattr(gf, name))))
            for name in api_names()
            if inspect.isclass(getattr(gf, name)) == of_classes
        ]
        pieces += [f"## {heading}", table(("name", "purpose"), rows)]
    return "\n\n".join(pieces) + "\n"


def _summary(one: Any) -> str:
    """Returns the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(one) or "").split("\n\n")[0].split())


def api_page(name: str) -> str:
    """Returns the page of a public name, for autodoc."""
    one = getattr(gf, name)
    if not inspect.isclass(one):
        return f"{MADE}# gf.{name}\n\n```{{eval-rst}}\n.. autofunction:: glassformer.{name}\n```\n"
    return f"{MADE}# gf.{name}\n\n```{{eval-rst}}\n.. autoclass:: glassformer.{name}\n   :members:\n```\n"


# Files and errors


def files_page() -> str:
    """Returns the page of the files that the program writes."""
    pieces = [
        f"{MADE}# Files",
        "A file appears whole or not at all: it is written under another name first. Each format has a version, the "
        "key `schema`; a reader refuses another version than its own: "
        + ", ".join(f"{kind} {number}" for kind, number in SCHEMAS.items())
        + ". Keys that a reader does not know are kept.",
    ]
    for heading, some in FILES.items():
        rows = [(name if name.startswith(("a ", "an ")) else f"`{name}`", content) for name, content in some.items()]
        pieces += [f"## {heading}", table(("file", "content"), rows)]
    for heading, types in SHOWN_MODELS.items():
        pieces.append(f"## {heading}")
        for one in types:
            pieces += [f"### {one.__name__.strip('_')}", plainly(_summary(one) if one.__doc__ else "")]
            pieces.append(table(("field", "type", "meaning"), _fields(one)))
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def _fields(cls: Any) -> Iterator[tuple[str, str, str]]:
    meanings = {name: text for base in reversed(cls.__mro__) for name, text in field_docs(base).items()}
    for name, field in cls.model_fields.items():
        yield f"`{name}`", _type(field.annotation).replace("|", "\\|"), plainly(meanings.get(name, ""))


def _type(annotation: Any) -> str:
    """Returns a type as a reader of the file sees it: bounds are left out."""
    args = get_args(annotation)
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Annotated:
        return _type(args[0])
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(dict.fromkeys(_type(one) for one in args)).replace("int | float", "number")
    if get_origin(annotation) is Literal:
        return " | ".join(repr(one).replace("'", '"') for one in args)
    if get_origin(annotation) in (list, tuple):
        return f"list of {_type(args[0])}"
    if get_origin(annotation) is dict:
        return f"object of {_type(args[1])}"
    return str(getattr(annotation, "__name__", annotation)).replace("Any", "anything")


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Returns the strings below the fields of a class, by field."""
    if not cls.__module__.startswith("glassformer."):
        return {}
    body = ast.parse(dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(below, ast.Expr):
            found[one.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def errors_page() -> str:
    """Returns the page of errors and exit statuses."""
    statuses = [
        ("0", "done"), ("1", "the work failed, or was stopped and saved"), ("2", "the request was wrong"),
        ("130", "stopped by Ctrl-C"), ("143", "stopped by SIGTERM"),
    ]  # fmt: skip
    pieces = [
        f"{MADE}# Errors",
        "A wrong request raises `gf.RequestError` before anything is computed or written; work that fails raises "
        "`gf.WorkError`. Both have `code`, `field` and a sentence that names the value and a remedy; the command line "
        'prints the sentence, or with `--json` `{"error": {"code", "field", "message"}}`.',
        "## Codes",
        table(("code", "meaning"), ((f"`{code}`", escaped(meaning)) for code, meaning in CODES.items())),
        "## Exit status",
        table(("status", "meaning"), statuses),
    ]
    return "\n\n".join(pieces) + "\n"


LISTS = {
    "benchmarks/index": (
        "Benchmarks",
        "Speeds and errors next to the published peers, measured in turn on one machine; each page names the processor "
        "and the command. `python -m benchmarks NAME` repeats one from the root of the source tree.",
    ),
    "tutorials/index": (
        "Tutorials",
        "Figures need `pip install '.[figures]'`. "
        "Each takes minutes to read and less than two minutes to run on two cores, offline, and ends with an exercise "
        "whose answer is checked. The same as programs: `examples/tutorials`.",
    ),
    "howto/index": ("How-to pages", "One question each: the command, its output, and what can go wrong."),
}
"""Title and introduction of pages that list those below them in the site's map."""


def list_page(name: str) -> str:
    """Returns a page that lists the pages below it, with the first sentence of each."""
    title, words = LISTS[name]
    rows = []
    for page in children(DOCS, name):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        heading = re.search(r"^# (.*)$", text, re.MULTILINE)
        link = os.path.relpath(DOCS / f"{page}.md", (DOCS / name).parent)
        rows.append((f"[{heading[1] if heading else page}]({link})", escaped(first_sentence(text))))
    return f"{MADE}# {title}\n\n{words}\n\n{table(('page', 'content'), rows)}\n"


if __name__ == "__main__":
    run_examples(sys.argv[1:] or list(VERBS))
