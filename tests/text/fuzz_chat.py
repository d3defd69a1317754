"""Random templates against the sandbox: `python -m tests.text.fuzz_chat --seconds 600`.

Half of them are grown from a grammar, so that most of those run; half are templates cut, repeated and spliced. Only a
text or a RequestError of one sentence may come back. Prints how many were tried, and what became of them.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter

from glassformer.errors import RequestError
from glassformer.text.chat_template import ChatTemplate, TemplateWorker


def words(text: str) -> list[str]:
    """Returns the words of a text; a middle dot in a word means a space."""
    return [word.replace("·", " ") for word in text.split()]


SEEDS = [
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{% if messages[0].role == 'a' %}{% set s = messages[0].content %}{% else %}{% set s = '' %}{% endif %}{{ s }}",
    "{% set ns = namespace(n=0, last=none) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro f(m, d=2) %}{{ m | tojson(indent=d) }}{% if d %}{{ f(m, d - 1) }}{% endif %}{% endmacro %}{{ f(a) }}",
    "{%- for m in messages if m.role -%}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.cycle('a') }}{% endfor %}",
    "{% macro f() %}{{ caller(1) }}{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
    "{{ '%s %5d' | format('a', 3) }}{{ '{0!r:>9}'.format(messages) }}{{ messages | map(attribute='role') }}",
]
PIECES = words("""
    {{ }} {% %} {# #} -%} {%- ' " ( ) [ ] { } | . ~ * ** // - , = != : endfor if else endif set endset endblock endmacro
    with endwith raw endraw autoescape recursive for·i·in·range(99999) block·a macro·f() include·'a' import·'a'·as·b
    extends·'a' from·'a'·import·b not·
""")
NAMES = words(r"""
    messages messages[0] self loop loop.index caller f namespace() namespace(a=1) dict() dict(a=1) range(9) range(10**9)
    cycler(1,2) joiner() none true 0 -1 3.5 10**9 10**30 '' 'x' 'é\n' '\ud800' 'x'*10**9 [] [1] [[]] {} {'a':1} (1,2) a
    b.c.d '%0999999999d'%1 '{0.__class__}' ''.__class__ ''['__class__'] ''|attr('__class__') messages.__class__.__mro__
    f() super() range f.__globals__ cycler.__init__ raise_exception raise_exception('no') strftime_now('%c') eos_token
""")
FILTERS = words("""
    upper trim list join first last length tojson pprint sort unique reverse string int float abs escape urlize title
    striptags center(10**9) center(99) indent(99) wordwrap(1) batch(2) slice(3) groupby('role') map('upper') select
    map(attribute='role') selectattr('role') reject attr('__class__') attr('__init__') format(1) replace('x','yy') round
    sum min max random xmlattr dictsort filesizeformat truncate(3) wordcount items default('z') tojson(indent=9)
""")
TESTS = words("defined none string iterable mapping sameas(1) in(messages) callable number even eq(1) divisibleby(0)")
BINARY = words("+ - * / // % ** ~ == != < > <= >= and or in")
METHODS = words("format join items get append split encode __class__ replace update")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 7 * 7 }} — é\n"}]


def expression(rng: random.Random, depth: int) -> str:
    def inner() -> str:
        return expression(rng, depth - 1)

    kind = rng.randrange(9) if depth else 0
    if kind <= 1:
        return rng.choice(NAMES)
    if kind == 2:
        return f"({inner()} {rng.choice(BINARY)} {inner()})"
    if kind <= 4:
        return f"{inner()}|{rng.choice(FILTERS)}"
    if kind == 5:
        return f"({inner()} is {rng.choice(TESTS)})"
    if kind == 6:
        return f"{inner()}[{inner()}]" if rng.random() < 0.5 else f"{inner()}[{inner()}:{inner()}]"
    if kind == 7:
        name = rng.choice(METHODS)
        return f"{inner()}.{name}({inner() if rng.random() < 0.7 else ''})"
    return f"({inner()} if {inner()} else {inner()})"


def template(rng: random.Random, depth: int) -> str:
    def body() -> str:
        return template(rng, depth - 1)

    def value() -> str:
        return expression(rng, rng.randrange(3))

    kind = rng.randrange(11) if depth else rng.randrange(2)
    name = rng.choice(["a", "b", "f", "ns"])
    return {
        0: lambda: "text",
        1: lambda: "{{ " + value() + " }}",
        2: lambda: body() + body(),
        3: lambda: f"{{% for {name} in {value()} %}}{body()}{{% else %}}{body()}{{% endfor %}}",
        4: lambda: f"{{% if {value()} %}}{body()}{{% else %}}{body()}{{% endif %}}",
        5: lambda: f"{{% set {name} = {value()} %}}{body()}",
        6: lambda: (
            f"{{% macro {name}(x=1) %}}{body()}{{{{ caller() if caller else x }}}}{{% endmacro %}}{{{{ {name}() }}}}"
        ),
        7: lambda: f"{{% set {name} %}}{body()}{{% endset %}}{body()}",
        8: lambda: f"{{% filter {rng.choice(FILTERS)} %}}{body()}{{% endfilter %}}",
        9: lambda: f"{{% with {name} = {value()} %}}{body()}{{% endwith %}}",
        10: lambda: f"{{% for i in range({rng.choice((3, 9, 999))}) %}}{body()}{{% endfor %}}",
    }[kind]()


def mutated(rng: random.Random) -> str:
    source = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, 4)):
        at, end = sorted(rng.randrange(len(source) + 1) for _ in range(2))
        piece = rng.choice((PIECES, NAMES, FILTERS))[rng.randrange(30)]
        source = rng.choice(
            (
                source[:at] + piece + source[at:],
                source[:at] + piece * rng.choice((2, 30, 3000)) + source[at:],
                source[:at] + source[end:],
                source[:at] + source[at:end] * rng.choice((2, 9)) + source[end:],
                source[:at] + rng.choice(SEEDS)[at:],
                source[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0x10000), 0x1F600))) + source[at + 1 :],
            )
        )
    return source.encode("utf-8", "replace").decode()[:60_000]


def run(seconds: float, seed: int = 0) -> Counter[str]:
    """Returns the number of tried templates by outcome: `text`, or the start of the error's sentence."""
    rng, found, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    worker = TemplateWorker(seconds=0.5)
    try:
        while time.monotonic() < end:
            source = mutated(rng) if rng.random() < 0.5 else template(rng, 5)
            chat = ChatTemplate(source, {"eos_token": "</s>"})
            chat._worker = worker  # one process for all, so that one template may spoil it for the next
            try:
                assert isinstance(chat.render(MESSAGES), str)
                found["text"] += 1
            except RequestError as problem:
                sentence = str(problem)
                assert "\n" not in sentence and len(sentence) < 400, (source, sentence)
                found[re.sub(r"\d+", "N", sentence.partition("(")[0]).strip()] += 1
    finally:
        worker.stop()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = run(arguments.seconds, arguments.seed)
    print(f"{sum(counts.values())} templates")
    for outcome, count in counts.most_common():
        print(f"{count:8d}  {outcome}")
