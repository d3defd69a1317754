"""Message catalogues: read as the standard library reads them, bounded, and held out program by program."""

from __future__ import annotations

import gettext
import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.text.catalogues import LONGEST, messages, open_catalogues, placeholders
from glassformer.text.held_out import split
from tests.refused import refused

HEADER = "Content-Type: text/plain; charset={}\nPlural-Forms: nplurals=2; plural=n != 1;\n"


def catalogue(entries: dict[str, str], encoding: str = "UTF-8", sign: str = "<") -> bytes:
    """In GNU's format, as its manual describes it."""
    entries = {"": HEADER.format(encoding), **entries}
    sides = [[text.encode(encoding) for text in side] for side in (sorted(entries), map(entries.get, sorted(entries)))]  # type: ignore[arg-type, union-attr]
    n, at, tables, data = len(entries), 28 + 16 * len(entries), b"", b""
    for side in sides:
        for text in side:
            tables += struct.pack(f"{sign}2I", len(text), at + len(data))
            data += text + b"\0"
    return struct.pack(f"{sign}7I", 0x950412DE, 0, n, 28, 28 + 8 * n, 0, at) + tables + data


WORDS = {"open": "öffnen", "menu\x04open": "Öffnen", "one file\0%d files": "eine Datei\0%d Dateien"}


@pytest.mark.parametrize("sign", ["<", ">"])
@pytest.mark.parametrize("encoding", ["UTF-8", "ISO-8859-1"])
def test_a_catalogue_is_read_as_the_standard_library_reads_it(encoding: str, sign: str):
    data = catalogue(WORDS, encoding, sign)
    theirs = gettext.GNUTranslations(io.BytesIO(data))
    found = list(messages(data))
    assert sorted(found) == [("one file", "eine Datei"), ("open", "Öffnen"), ("open", "öffnen")]
    assert theirs.gettext("open") == "öffnen" and theirs.pgettext("menu", "open") == "Öffnen"
    assert theirs.ngettext("one file", "%d files", 1) == "eine Datei"


@given(st.data())
def test_a_damaged_catalogue_is_refused_or_read(data: st.DataObject):
    """Whatever its lengths and places say: no more comes out than went in."""
    whole = bytearray(catalogue(WORDS))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = list(messages(cut))
    except ValueError:
        return
    assert sum(len(source) + len(target) for source, target in found) <= len(cut)


@pytest.mark.parametrize("encoding", ["iso-8859-12", "windows-1259", "rot13", "nonsense"])
def test_an_encoding_that_is_not_known_is_refused(encoding: str):
    damaged = catalogue({"a": "b"}, "ascii").replace(b"charset=ascii", f"charset={encoding}".encode())
    with pytest.raises(ValueError, match="not known"):
        list(messages(damaged))


def test_lengths_that_share_bytes_are_refused():
    """A thousand messages, each the whole file: a small file would make a large text."""
    n = 1000
    table = struct.pack("<2I", 16 * n, 28) * n
    with pytest.raises(ValueError, match="longer than the file"):
        list(messages(struct.pack("<7I", 0x950412DE, 0, n, 28, 28 + 8 * n, 0, 0) + 2 * table))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%s: cannot open %d of %(name)s", ["%(name)s", "%d", "%s"]),
        ("%1$s and %2$-5.3f, %zu, %%", ["%%", "%1$s", "%2$-5.3f", "%zu"]),
        ("{count} files in <b>{0}</b> &amp; more", ["&amp;", "</b>", "<b>", "{0}", "{count}"]),
        ("100 % of a & b < c", []),
    ],
)
def test_placeholders(text: str, found: list[str]):
    assert placeholders(text) == found


def test_programs_are_held_out_whole(tmp_path: Path):
    """Pairs once, in the first program that has them; no tabs; nothing that is not translated, empty, or too long."""
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    for program in range(24):
        own = {f"message {i} of {program}": f"Nachricht {i} von {program}" for i in range(5)}
        common = {"yes": "ja", "OK": "OK", "tab\there": "hier", "much": "viel" * LONGEST, "nothing": ""}
        (folder / f"{chr(97 + program)}-tool.mo").write_bytes(catalogue({**own, **common}))
    (folder / "bad.mo").write_bytes(b"no catalogue")
    found = open_catalogues("gettext:de", (str(tmp_path),))
    texts = [document.text for document in found.documents()]
    assert len(texts) == len(set(texts)) == 24 * 5 + 2 and "tab here\thier" in texts
    assert found.notes == {"programs": 24, "pairs": 122, "too_long": 24, "damaged": 1}
    assert open_catalogues("gettext:de", (str(tmp_path),)).fingerprint == found.fingerprint
    parts = split(found)
    sides = [{document.group for document in side.documents()} for side in (parts.train, parts.validation)]
    assert all(sides) and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 24


@pytest.mark.parametrize("language", ["xx", "../../etc", "", "d" * 50, "de/../fr", "*"])
def test_a_language_that_is_not_here_is_refused(language: str, tmp_path: Path):
    with refused(code="unknown", field="data") as caught:
        open_catalogues(f"gettext:{language}", (str(tmp_path),))
    assert "\n" not in str(caught.value)
