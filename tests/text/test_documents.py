from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.text.documents import Document, in_pieces, mended
from glassformer.text.tokenizers import BPETokenizer

LINES = st.lists(st.text("ab 1'.\n\r\té漢", max_size=12), max_size=30).map("\n".join)


@given(st.lists(st.text("ab \n", max_size=30), max_size=10), st.integers(1, 20))
def test_pieces_join_to_the_text_and_are_bounded(chunks: list[str], size: int) -> None:
    pieces = list(in_pieces(chunks, size))
    assert "".join(pieces) == "".join(chunks)
    assert all(0 < len(piece) <= size for piece in pieces)


@given(st.text("ab \n", min_size=1, max_size=200), st.integers(1, 20), st.integers(1, 20))
def test_pieces_do_not_depend_on_how_the_text_arrived(text: str, size: int, chunk: int) -> None:
    chunks = [text[at : at + chunk] for at in range(0, len(text), chunk)]
    assert list(in_pieces(chunks, size)) == list(in_pieces([text], size))


def test_a_text_of_lines_is_cut_at_line_ends() -> None:
    text = "".join(f"line {number}\n" for number in range(1000))
    pieces = list(Document("d", text).pieces(100))
    assert len(pieces) > 50
    assert all(piece.endswith("\n") for piece in pieces)


@given(LINES)
@settings(deadline=None, max_examples=50)
def test_pieces_encode_as_the_whole_wherever_a_clean_cut_exists(text: str) -> None:
    # visible characters around each line end, so that every window holds a clean cut
    text = "".join(f"x{line.strip()}y\n" for line in text.splitlines())
    pieces = list(in_pieces([text], 100))
    assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text).tolist()


BPE = BPETokenizer.train(["the cat\n\nsat  on the mat\n" * 20], 300)


def test_lone_surrogates_are_mended_and_nothing_else() -> None:
    assert mended("a\ud800b\U0001f600é\x00") == "a\ufffdb\U0001f600é\x00"
