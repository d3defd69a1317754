"""Installed translations as pairs: the message catalogues (.mo) of programs on this machine."""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from glassformer.errors import RequestError, did_you_mean
from glassformer.text.documents import BETWEEN, Corpus, Document

CATALOGUES = "gettext:"
FOLDERS = ("/usr/share/locale", "/usr/share/locale-langpack", "/usr/local/share/locale")
DJANGO = "conf/locale", "contrib/*/locale"
"""Patterns of the folders of catalogues within Django, which the extra `translate` installs."""

LARGEST = 32 << 20
"""Most bytes of a catalogue file."""
LONGEST = 240
"""Most UTF-8 bytes of a message or its translation, so that byte-level tokens and an end fit into a context of 256;
longer pairs are left out."""
LEAST_PROGRAMS = 20
"""Number of programs below which pairs are held out one by one, instead of by program."""
VERSION = 1  # version of the content of pairs

MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
"""First four bytes of a catalogue -> its byte order, as a `struct` format."""
ENCODING = re.compile(
    r"utf-?8|(?:us-)?ascii|iso-?8859-\d{1,2}|windows-125\d|cp125\d|koi8-[rut]|euc-(?:jp|kr)|gb2312|gbk|gb18030|big5"
    r"|shift[-_]jis|tis-620"
)
"""Pattern of accepted encodings; Python knows others that are not for text."""
PLACEHOLDER = re.compile(
    r"%(?:\([^()\s]{1,40}\)|\d{1,4}\$)?[-+#0']{0,5}(?:\*|\d{1,4})?(?:\.(?:\*|\d{1,4}))?(?:hh|h|ll|l|z|j|t|L)?[a-zA-Z%]"
    r"|\{[^{}\s]{0,40}\}|</?[a-zA-Z][^<>]{0,80}>|&[a-zA-Z]{2,8};"
)
"""Pattern of substrings that a translation has to keep: %s, %(name)d, %1$s, {name}, <b>, &amp;."""


def placeholders(text: str) -> list[str]:
    """Returns the placeholders and the markup of a message, sorted."""
    return sorted(PLACEHOLDER.findall(text))


def messages(data: bytes) -> Iterator[tuple[str, str]]:
    """Yields (message, translation) of a catalogue in GNU's format, of either byte order; of a plural message only its
    singular form. Raises ValueError if lengths and offsets exceed the file, or its encoding is not accepted."""
    sign = MAGIC.get(data[:4])
    if sign is None or len(data) < 20:
        raise ValueError("not the start of a catalogue")
    count, first, second = struct.unpack_from(f"{sign}3I", data, 8)
    if max(first, second) + 8 * count > len(data):
        raise ValueError(f"its tables of {count} messages go past its end")
    tables = [struct.unpack_from(f"{sign}{2 * count}I", data, table) for table in (first, second)]
    if sum(sum(table[::2]) for table in tables) > len(data):
        raise ValueError("its messages are longer than the file")
    encoding = "utf-8"
    for number in range(count):
        sides = []
        for table in tables:
            length, place = table[2 * number : 2 * number + 2]
            if place + length > len(data):
                raise ValueError(f"message {number} goes past its end")
            sides.append(data[place : place + length].split(b"\0")[0])
        source, target = sides
        if not source:
            if found := re.search(rb"charset=([A-Za-z0-9._-]{1,40})", target):
                encoding = found[1].decode().lower()
                if not ENCODING.fullmatch(encoding) or not _has(encoding):
                    raise ValueError(f"its encoding {encoding} is not known")
            continue
        yield source.decode(encoding).split("\x04")[-1], target.decode(encoding)


def _has(encoding: str) -> bool:
    """Returns True if Python knows the encoding, since the pattern also accepts names that never existed
    (iso-8859-12)."""
    try:
        codecs.lookup(encoding)
    except LookupError:
        return False
    return True


def open_catalogues(data: str, folders: tuple[str, ...] | None = None) -> Corpus:
    """Opens `gettext:LANGUAGE`: each message of the installed programs with translations to LANGUAGE, and of an
    installed Django, is a document: the message, a tab, its translation, placeholders included. A message counts once,
    for the first program that has it; untranslated and too long ones are left out. A program is held out as a whole, if
    there are LEAST_PROGRAMS.

    Raises RequestError for a language without any installed program."""
    language, places = data.removeprefix(CATALOGUES), FOLDERS if folders is None else folders
    if not re.fullmatch(r"[A-Za-z]{2,3}(?:[_@][A-Za-z]{2,10}){0,2}", language):
        raise _unknown(data, language, places)
    found: dict[str, tuple[str, str]] = {}
    sha, long, damaged = hashlib.sha256(f"{VERSION} {LONGEST}".encode()), 0, 0
    for program, path in _files(language, places):
        try:
            raw = path.read_bytes() if path.stat().st_size <= LARGEST else b""
            pairs = list(messages(raw))
        except (OSError, ValueError):  # includes UnicodeDecodeError
            damaged += 1
            continue
        sha.update(f"{program} {len(raw)}".encode() + hashlib.sha256(raw).digest())
        for sides in pairs:
            source, target = (side.replace(BETWEEN, " ").strip() for side in sides)
            if not source or not target or source == target or source in found:
                continue
            if max(len(source.encode()), len(target.encode())) > LONGEST:
                long += 1
                continue
            found[source] = target, program
    if not found:
        raise _unknown(data, language, places)
    programs = {program for _, program in found.values()}
    together = len(programs) >= LEAST_PROGRAMS

    def documents() -> Iterator[Document]:
        for number, (source, (target, program)) in enumerate(found.items()):
            yield Document(f"{program} {number}", f"{source}{BETWEEN}{target}", program if together else None)

    notes: dict[str, object] = {"programs": len(programs), "pairs": len(found), "too_long": long, "damaged": damaged}
    size = sum(len(source) + len(target) for source, (target, _) in found.items())
    return Corpus(data, sha.hexdigest(), documents, size, notes)


def _files(language: str, folders: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Returns (program, path) of each catalogue of a language, sorted. The program is named by the letters at the start
    of the file's name, in lower case, because pg_dump and pg_restore share messages."""
    found = []
    for folder in folders:
        for path in Path(folder).glob(f"{language}/LC_MESSAGES/*.mo"):
            letters = re.match(r"[A-Za-z]*", path.stem)
            found.append(((letters and letters[0].lower()) or path.stem, path))
    if folders == FOLDERS:
        found += [("django", path) for path in _django(language)]
    return sorted(found)


def _django(language: str) -> list[Path]:
    """Returns the paths of an installed Django's catalogues of a language; Django is not imported."""
    spec = importlib.util.find_spec("django")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return [
        path for root in roots for where in DJANGO for path in Path(root).glob(f"{where}/{language}/LC_MESSAGES/*.mo")
    ]


def _unknown(data: str, language: str, folders: tuple[str, ...]) -> RequestError:
    known = sorted({path.parent.parent.name for folder in folders for path in Path(folder).glob("*/LC_MESSAGES/*.mo")})
    most = f"; there are {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}" if known else ""
    return RequestError(
        f"data={data!r}: no program here has catalogues of that language{most}{did_you_mean(language, known)}",
        code="unknown", field="data", value=data, expected=f"{CATALOGUES}LANGUAGE",
    )  # fmt: skip
