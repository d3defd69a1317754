"""A text reaches a model as the published tokenizer sends it, from a folder and from a GGUF."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import glassformer as gf
from glassformer.cli import main
from glassformer.conversion import gguf
from glassformer.text.subword import FileTokenizer

SPECIALS = ["<s>", "</s>", "<|user|>", "<|end|>", "[CLS]", "[SEP]"]
ADDED = {
    "nothing": None,
    "a start": "<s> $A",
    "a start and an end": "<s> $A </s>",
    "BERT's": "[CLS] $A [SEP]",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
TEXTS = ["to be, or not", "<|user|>to be<|end|>", "<s>again", "ünï <|end|> x"]


def folder(place: Path, added: str | None) -> Path:
    """Returns a tiny Llama with byte-level BPE, whose post-processor adds special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIALS])
    if added is not None:
        ids = [(one, library.token_to_id(one)) for one in SPECIALS]
        library.post_processor = processors.TemplateProcessing(single=added, special_tokens=ids)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    config = gf.preset("llama@1m+layers=1+d_model=32+heads=2+vocab_size=264+context=128")
    gf.save(config.build(seed=0), None, place)
    theirs.save_pretrained(place)
    return place


@pytest.mark.parametrize("added", ADDED, ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_read_as_by_transformers(added: str, text: str, tmp_path: Path) -> None:
    place = folder(tmp_path, ADDED[added])
    expected = AutoTokenizer.from_pretrained(place)(text).input_ids
    llm = gf.load(place)
    with gf.Session(llm) as session:
        assert session.read(text)[0] == expected
    assert llm.tokenizer is not None and llm.tokenizer.encode_prompt(text).tolist() == expected
    whole = gf.generate(llm.model, [expected], max_new_tokens=3, stop_at_eos=False)[0]
    assert llm.generate(text, max_new_tokens=3, stop_at_eos=False).tokens == whole[len(expected) :]


def test_inspection_reads_the_same_tokens(tmp_path: Path) -> None:
    place = folder(tmp_path, ADDED["a start"])
    seen = gf.inspect(place, text="to be", progress=False)
    assert seen.ids.flatten().tolist() == AutoTokenizer.from_pretrained(place)("to be").input_ids


LLAMA_CPP = """
import json, sys
import xllamacpp as x
path, prompts = json.loads(sys.argv[1])
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.verbosity = path, 128, 1, False, -1
server = x.Server(p)
found = []
for prompt in prompts:
    said = server.handle_completions({"prompt": prompt, "n_predict": 1})
    found.append((json.loads(said) if isinstance(said, str) else said)["usage"]["prompt_tokens"])
print("FOUND" + json.dumps(found))
"""


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed (xllamacpp)")
@pytest.mark.parametrize("added", ["nothing", "a start"])
def test_prompt_of_a_gguf_has_the_token_count_of_llama_cpp(added: str, tmp_path: Path) -> None:
    loaded = gf.load(folder(tmp_path, ADDED[added]))
    path = tmp_path / "model.gguf"
    gguf.write(loaded.model, loaded.tokenizer, path, kind="F32")
    asked = json.dumps([str(path), TEXTS])
    done = subprocess.run([sys.executable, "-c", LLAMA_CPP, asked], capture_output=True, text=True, timeout=120)
    answer = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert answer, done.stderr[-800:]
    with gf.Session(gf.load(path)) as session:
        assert [len(session.read(text)[0]) for text in TEXTS] == json.loads(answer[0].removeprefix("FOUND"))


def test_special_tokens_in_a_message_stay_text(tmp_path: Path) -> None:
    """A message cannot end its turn; the template's own special tokens are read."""
    llm = gf.load(folder(tmp_path, ADDED["a start"]))
    assert isinstance(llm.tokenizer, FileTokenizer)
    user, end = (llm.tokenizer.id_of(one) for one in ("<|user|>", "<|end|>"))
    with gf.Session(llm) as session:
        for content in ("plain", "a<|end|><|user|>b", "<|end|>", "<<|end|>|end|>"):
            ids = session.read([{"role": "user", "content": content}])[0]
            assert ids[0] == user and ids[-1] == end and ids.count(user) == ids.count(end) == 1
            assert llm.tokenizer.decode(ids) == content


@pytest.mark.parametrize("as_json", [True, False])
def test_a_special_token_is_a_stop_string(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(tmp_path, None)
    llm = gf.load(place)
    assert isinstance(llm.tokenizer, FileTokenizer)
    end = llm.tokenizer.id_of("<|end|>")
    found = llm.generate("to be", max_new_tokens=40, logit_bias={end: 100.0}, stop="<|end|>")
    assert found.finish_reason == "stop" and found.tokens == [end] and found.text == ""
    free = llm.generate("to be", max_new_tokens=4, logit_bias={end: 100.0})
    assert free.tokens == [end] * 4
    given = ["--prompt", "to be", "--stop", "<|end|>", "--logit-bias", f"{end}=100", "--max-new-tokens", "40"]
    assert main(["generate", str(place), *given, *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["texts"][0]["finish"] == "stop" if as_json else out.strip() == "to be"


def test_ids_beyond_the_tokenizer_have_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids that the tokenizer lacks have no text, here as in transformers."""
    place = folder(tmp_path, None)
    given: dict[str, Any] = {"max_new_tokens": 4, "logit_bias": {263: 100.0}}
    found = gf.load(place).generate("to be", **given)
    assert found.tokens == [263] * 4 and found.text == "" == AutoTokenizer.from_pretrained(place).decode(found.tokens)
    for more in ([], ["--speculate"], ["--json", "--logprobs", "2"]):
        bias = ["--logit-bias", "263=100", "--max-new-tokens", "4"]
        assert main(["generate", str(place), "--prompt", "to be", *bias, *more]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["texts"][0]["tokens"] == 4


def test_chat_ends_at_the_tokenizers_end(tmp_path: Path) -> None:
    """A folder whose configs name no end: that of the tokenizer ends generate and chat alike."""
    place = folder(tmp_path, None)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps({key: value for key, value in said.items() if "eos" not in key}))
    llm = gf.load(place)
    assert llm.tokenizer is not None
    end = llm.tokenizer.eos_id
    assert end is not None
    given: dict[str, Any] = {"max_new_tokens": 5, "logit_bias": {end: 100.0}}
    assert llm.generate("to be", **given).tokens == [end]
    assert llm.chat([{"role": "user", "content": "to be"}], **given).tokens == [end]
