"""Bounds on how much the steps of a tokenizer.json lengthen a text. Forty steps that double it would take all memory,
already while the file is read, since added tokens are prepared like text."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
LARGEST_GROWTH = 1 << 16  # SeamlessM4T, the largest of the published families, counts 41,472
SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
# Most characters (or tokens) that one can become, with those put before or around it. Unicode's NFKC and NFKD make 18
# of U+FDFA, its other forms 3 or 4; a lower case has at most two letters, UTF-8 at most four bytes.
STEPS = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 24, "ByteLevel": 5, "Metaspace": 2,
    "BertProcessing": 3, "RobertaProcessing": 3, "BPEDecoder": 2, "WordPiece": 2, "CTC": 2,
}  # fmt: skip


def check(said: Any) -> None:
    """Raises ValueError unless each step in a part of a tokenizer.json is an object (the library would accept lists)
    and a table of SentencePiece has its stated length, for which the library allocates memory."""
    if not isinstance(said, dict):
        raise ValueError("a step of its normalizer, pre_tokenizer, post_processor or decoder is not a JSON object")
    if isinstance(table := said.get("precompiled_charsmap"), str):
        _texts(table)
    for name in SEQUENCES:
        for step in said.get(name) or ():
            check(step)


def growth(description: Mapping[str, Any]) -> float:
    """Returns an upper bound on the number of tokens or characters that the parts of a tokenizer.json make of one
    character. `description`: the file's content as the library writes it."""
    return math.prod(_step(part) for name in PARTS if (part := description.get(name)))


def _step(part: Mapping[str, Any]) -> float:
    if name := next((name for name in SEQUENCES if name in part), None):
        return math.prod(map(_step, part[name]))
    kind = part["type"]
    if kind == "Replace":  # a regular expression may match the empty string, between any two characters
        before, after = part["pattern"].get("String"), part["content"]
        return max(1.0, len(after) / len(before)) if before else 1.0 + len(after)
    if kind == "Prepend":
        return 1.0 + len(part["prepend"])
    if kind == "Precompiled":
        texts = _texts(part["precompiled_charsmap"]).decode("utf-8", "replace")
        return max(1.0, max(map(len, texts.split("\0"))))
    if kind == "TemplateProcessing":
        ids = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
        return max(1.0, sum(ids.get(piece.get("SpecialToken", {}).get("id"), 1) for piece in part["single"]))
    return float(STEPS.get(kind, 1))


def _texts(table: str) -> bytes:
    """Decodes a base64 table of SentencePiece and returns the replacement strings in it, each ended by a zero byte. The
    decoded table has 4 bytes with the length of an index, the index, and the strings. Raises ValueError if the index is
    longer than the table."""
    found = base64.b64decode(table)
    if (end := 4 + int.from_bytes(found[:4], "little")) > len(found):
        raise ValueError(f"its precompiled_charsmap has {len(found)} bytes and says that only its index has {end - 4}")
    return found[end:]
