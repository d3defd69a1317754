"""Calls of functions: a grammar for answers with calls, and conversion of calls to and from text.

A call is `<tool_call>`, a JSON object with name and arguments, `</tool_call>`, as Hermes and Qwen2.5 write it. Chat
templates of this form list the functions; for other templates the system message lists them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_CALLS = 8
"""Largest number of calls of one answer."""
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without parameters."""
SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Text of Qwen2.5's template that lists functions, for the system message of templates without tools."""


@dataclass
class Call:
    """Call of a function."""

    name: str
    arguments: str
    """JSON object."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


def call_grammar(functions: Sequence[Mapping[str, Any]], *, required: bool, most: int) -> str:
    """Returns a grammar, in Lark's form, of answers with at most `most` calls; unless `required`, also of plain texts.

    `functions` have a name and parameters (a JSON schema)."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
    options = []
    for one in functions:
        schema = dict(one.get("parameters") or NO_ARGUMENTS) | {"x-guidance": spacing}
        head, tail = json.dumps(f'\n{{"name": "{one["name"]}", "arguments": '), json.dumps(f"}}\n{CLOSE}")
        options.append(f"{head} %json {json.dumps(schema)} {tail}")
    lines = ["%llguidance {}", "body: " + "\n    | ".join(options)]
    more = ""
    if most > 1:
        lines, more = [*lines, f'more: "\\n{OPEN}" body'], f" more{{0,{most - 1}}}"
    if required:
        lines.append(f'start: "{OPEN}" body{more}')
    else:
        lines += [f"start: text | opened body{more}", "TEXT: /(.|\\n)*/", "text: TEXT", f'opened[lazy]: TEXT "{OPEN}"']
    return "\n".join(lines)


def shows_tools(template: str) -> bool:
    """Returns True for a chat template that lists functions and writes calls in this form."""
    return OPEN in template and "tools" in template


def described(messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages for a template without tools: functions, calls and results become text of messages."""
    found: list[dict[str, Any]] = []
    for one in messages:
        text = one.get("content") or ""
        if one["role"] == "tool":
            result = f"<tool_response>\n{text}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result, "results": True})
            continue
        calls = [
            f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
            for call in one.get("tool_calls") or ()
        ]
        kept = {key: value for key, value in one.items() if key not in ("tool_calls", "tool_call_id")}
        found.append(kept | {"content": "\n".join([text] * bool(text) + calls)})
    for message in found:
        message.pop("results", None)
    if functions:
        listed = "\n".join(json.dumps({"type": "function", "function": one}, ensure_ascii=False) for one in functions)
        words = SYSTEM.format(tools=listed)
        if found and found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{found[0]['content']}\n\n{words}"}
        else:
            found.insert(0, {"role": "system", "content": words})
    return found


class CallReader:
    """Splitter of a growing text into text and calls; characters that may still become a call are held back."""

    def __init__(self) -> None:
        self._held = ""
        self.count = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Takes new characters; returns those that can be shown now, and the calls that they complete."""
        self._held += text
        shown, calls = "", list[Call]()
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                kept = next(k for k in range(min(len(OPEN) - 1, len(before)), -1, -1) if before.endswith(OPEN[:k]))
                cut = len(before) - kept
                shown, self._held = shown + before[:cut], before[cut:]
                break
            body, closed, after = rest.partition(CLOSE)
            if not closed:
                shown, self._held = shown + before, opened + rest
                break
            call = _call_of(body)
            if call is None:
                shown += before + opened + body + closed
            else:
                shown += before
                calls.append(call)
            self._held = after
        if self.count or calls:  # white space between calls
            shown = shown.strip()
        self.count += len(calls)
        return shown, calls

    def close(self) -> str:
        """Returns the characters that were held back; an incomplete call stays text."""
        rest, self._held = self._held, ""
        return rest


def _call_of(body: str) -> Call | None:
    """Returns the call whose JSON is `body`; None if it is not a call."""
    try:
        found = json.loads(body)
        return Call(str(found["name"]), json.dumps(found["arguments"], ensure_ascii=False))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
