"""Tokenizers of the `tokenizers` library: byte-level BPE and words trained here, and any `tokenizer.json`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glassformer.errors import Code, RequestError, shown
from glassformer.files import atomic_file
from glassformer.progress import OnProgress, silent
from glassformer.text import patterns, token_settings
from glassformer.text.documents import mended, utf8
from glassformer.text.growth import LARGEST_GROWTH, PARTS, check, growth
from glassformer.text.vocabulary import END_OF_TEXT, UNKNOWN, Ids, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

LARGEST_FILE = 256 * 1024 * 1024  # bytes of a tokenizer.json
LARGEST_SETTINGS = 16 * 1024 * 1024  # bytes of a tokenizer_config.json; chat templates are long
LARGEST_ID = 1 << 24
SIZES = {"bpe": (257, 1_000_000), "word": (3, 1_000_000)}
"""Kind of a trained tokenizer -> (smallest, largest) vocabulary. The smallest of bpe is the bytes and an end token, of
word an end token, the unknown token and a word."""
TRAINING_BYTES = 100_000_000  # merges learned from more text hardly differ, and take memory and hours
# End-of-text tokens, for files without a tokenizer_config.json that names it: the first existing one counts.
USUAL_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[SEP]")
USUAL_MASKS = ("[MASK]", "<mask>")
SPACE = "\u2581"  # the visible space of SentencePiece
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
EARLIER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that also name special tokens, in folders whose tokenizer_config.json lists no added tokens."""


class FileTokenizer(Tokenizer):
    """Tokenizer that a `tokenizer.json` describes. `kind` is the name of its model: `bpe`, `unigram`, `wordpiece`,
    `wordlevel`.

    `settings` is the `tokenizer_config.json` of its folder, kept for `eos_token`, `chat_template` (that of a
    `chat_template.jinja`, if it exists) and so on; nothing in it is executed. `bos_id`, `pad_id` and `unk_id` are ids,
    or None without such a token.
    """

    def __init__(self, library: Library, settings: dict[str, Any] | None = None) -> None:
        # A file may ask for truncation and padding, which would silently change a corpus.
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._lock = threading.Lock()
        self.settings = {key: value for key, value in (settings or {}).items() if key != "auto_map"}
        vocabulary = library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise RequestError(
                "this tokenizer.json has an empty vocabulary", code="missing", field="tokenizer.json:model.vocab"
            )
        # Ids may have holes; the model needs a row for each id up to the last.
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > LARGEST_ID:
            raise RequestError(
                f"this tokenizer.json has the token id {self.vocab_size - 1}; ids go up to {LARGEST_ID - 1}",
                code="range", field="tokenizer.json:model.vocab", value=self.vocab_size - 1,
            )  # fmt: skip
        if len(set(vocabulary.values())) < len(vocabulary):  # decoding would be ambiguous
            shared, count = Counter(vocabulary.values()).most_common(1)[0]
            raise RequestError(
                f"this tokenizer.json gives the id {shared} to {count} tokens; each needs its own",
                code="conflict", field="tokenizer.json:model.vocab", value=shared,
            )  # fmt: skip
        text = library.to_str()
        self._sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._description: dict[str, Any] = json.loads(text)
        self._model = {k: v for k, v in self._description.pop("model").items() if k not in ("vocab", "merges")}
        self.kind = str(self._model.get("type") or "bpe").lower()
        self.special_tokens = _special_tokens(self.settings)
        self.eos_id = self._find_end(vocabulary)
        self.bos_id, self.pad_id, self.unk_id = (
            vocabulary.get(self.special_tokens.get(name, "")) for name in ("bos_token", "pad_token", "unk_token")
        )
        if self.unk_id is None:
            self.unk_id = vocabulary.get(self._model.get("unk_token") or "", self._model.get("unk_id"))
        names = (self.special_tokens.get("mask_token", ""), *USUAL_MASKS)
        self.mask_id = next((vocabulary[name] for name in names if name in vocabulary), None)

    @classmethod
    def read(cls, path: str | Path) -> FileTokenizer:
        """Returns the tokenizer in a tokenizer.json, with the tokenizer_config.json and chat_template.jinja of its
        folder. Warns of settings that are not applied. Raises RequestError for a file that cannot be read or may take
        too long."""
        path = Path(path)
        library = _parsed(bounded(path, LARGEST_FILE), path)
        said = _read_settings(path.parent)
        named = token_settings.tokens(said)
        absent = _add_named(library, named)
        try:
            made = cls(library, said)
        except RequestError as problem:
            raise problem.of(str(path)) from None
        if absent:
            warnings.warn(f"{path} lacks special tokens that its settings name: {shown(', '.join(absent[:8]))}")
        if unheeded := token_settings.unheeded(
            said, token_settings.FileSteps(made._description, made.kind, made.ids())
        ):
            told = ", ".join(f"{shown(name)}={shown(value)}" for name, value in [*unheeded.items()][:8])
            warnings.warn(f"{path.parent / SETTINGS_FILE} has settings that are not applied: {told}")
        return made

    def _find_end(self, vocabulary: dict[str, int]) -> int | None:
        names = (self.special_tokens.get("eos_token", ""), *USUAL_ENDS)
        return next((vocabulary[name] for name in names if name in vocabulary), None)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Locks the library's tokenizer for other threads inside the block, in which a method may set its property
        `encode_special_tokens`. Raises RequestError instead of the library's errors."""
        with (
            self._lock,
            one_sentence("this tokenizer cannot process the text", "give one that knows <unk>", "unsupported"),
        ):
            yield

    def encode(self, text: str, *, parse_specials: bool = False, add_specials: bool = False) -> Ids:
        """Returns the ids of a text, (n,) int32. `parse_specials` parses special tokens spelled in `text`, as in a
        rendered chat; `add_specials` adds the tokens of the file's post-processor (BOS)."""
        utf8(text)
        with self._working():
            self._library.encode_special_tokens = not parse_specials
            return np.array(self._library.encode(text, add_special_tokens=add_specials).ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> Ids:
        return self.encode(text, parse_specials=True, add_specials=True)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        for text in texts:
            utf8(text)
        with self._working():
            self._library.encode_special_tokens = True
            found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

    def encode_whole(self, texts: Sequence[str], limit: int) -> list[Ids]:
        """Returns the ids of each text, (n,) int32, with the tokens of the file's post-processor (BERT's [CLS] and
        [SEP]); a text with more than `limit` ids is truncated, but these tokens are kept. Raises RequestError if
        `limit` has no room for text."""
        for text in texts:
            utf8(text)
        with self._working():
            self._library.encode_special_tokens = True
            room = limit - self._library.num_special_tokens_to_add(is_pair=False)
            if room < 1:
                raise RequestError(
                    f"limit={limit} leaves no room for a token of the text; use {limit - room + 1} or more",
                    code="range", field="limit", value=limit,
                )  # fmt: skip
            found = self._library.encode_batch(list(texts), add_special_tokens=False)
            for encoding in found:
                encoding.truncate(room)
            whole = [self._library.post_process(encoding) for encoding in found]
        return [np.array(encoding.ids, dtype=np.int32) for encoding in whole]

    def decode(self, ids: Any, *, keep_specials: bool = False) -> str:
        short = isinstance(ids, list) and len(ids) < 64 and all(type(i) is int and i >= 0 for i in ids)
        known = [i for i in ids if i < self.vocab_size] if short else self._known(ids).tolist()
        with self._working():
            return self._library.decode(known, skip_special_tokens=not keep_specials)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the file calls special, which have no text."""
        return frozenset(i for i, token in self._library.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def spelled_specials(self) -> tuple[str, ...]:
        """Texts of the special tokens, the longest first."""
        found = (token.content for token in self._library.get_added_tokens_decoder().values() if token.special)
        return tuple(sorted((one for one in found if one), key=len, reverse=True))

    def token_bytes(self) -> np.ndarray:
        """Returns the number of UTF-8 bytes of text of each id, (vocab_size,) int64. The numbers are exact for
        byte-level BPE (GPT-2, Llama 3, Qwen, those trained here).

        Best effort elsewhere: `<0xE2>` is 1 byte if the file has byte fallback, U+2581 is a space of 1 byte (also one
        that the file puts before each text), the continuation mark of WordPiece and the unknown token are 0, and any
        other token is its UTF-8 length.
        """
        steps = [self._description.get(key) for key in ("pre_tokenizer", "decoder")]
        byte_level = '"ByteLevel"' in json.dumps(steps)
        prefix = (self._model.get("continuing_subword_prefix") or "##") if self.kind == "wordpiece" else ""
        fallback = bool(self._model.get("byte_fallback"))
        alphabet = frozenset(byte_alphabet()) if byte_level else frozenset[str]()
        unknown = (self.unk_id, self._model.get("unk_id"))  # of the settings, of a unigram model
        added = {i: token.content for i, token in self._library.get_added_tokens_decoder().items()}

        def length(index: int, token: str) -> int:
            if index in self.special_ids or index in unknown or token == self._model.get("unk_token"):
                return 0
            if index in added:  # matched in the text as spelled, before any alphabet applies
                return len(token.encode())
            if byte_level and alphabet.issuperset(token):
                return len(token)
            if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return 1
            return len(token.removeprefix(prefix).replace(SPACE, " ").encode())

        counts = np.zeros(self.vocab_size, np.int64)
        for token, index in self._library.get_vocab(with_added_tokens=True).items():
            counts[index] = length(index, token)
        return counts

    def ids(self) -> dict[str, int]:
        """Returns {token: id} of the whole vocabulary, added tokens included."""
        return self._library.get_vocab(with_added_tokens=True)

    def description(self) -> dict[str, Any]:
        """Returns the content of the tokenizer.json, as plain values."""
        return json.loads(self._library.to_str())

    def id_of(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def with_special(self, name: str, token: str) -> FileTokenizer:
        """Returns a copy with the special token `token` in the role `name` of tokenizer_config.json, such as
        `pad_token`. A token that is not in the vocabulary gets the next id."""
        return self.with_specials([token], {name: token})

    def with_specials(self, tokens: Iterable[str], roles: dict[str, Any] | None = None) -> FileTokenizer:
        """Returns a copy with the special tokens `tokens` and with `roles` as entries of tokenizer_config.json. Tokens
        that are not in the vocabulary get the next ids."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Library

        library = Library.from_str(self._library.to_str())
        library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        end = None if self.eos_id is None else self._library.id_to_token(self.eos_id)
        return FileTokenizer(library, {**(self.settings or settings_of(end)), **(roles or {})})

    def adding_behind(self, token: int) -> FileTokenizer:
        """Returns a copy whose `encode` with `add_specials` adds one id to a text, `token` at its end."""
        from tokenizers import Tokenizer as Library
        from tokenizers.processors import TemplateProcessing

        library = Library.from_str(self._library.to_str())
        added = {"id": "added", "ids": [token], "tokens": [library.id_to_token(token)]}
        library.post_processor = TemplateProcessing(["$A", "added"], special_tokens=[added])
        return FileTokenizer(library, self.settings)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._sha256} eos {self.eos_id}".encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        end = self._library.id_to_token(self.eos_id) if self.eos_id is not None else None
        _write(self._library, Path(folder), self.settings or settings_of(end))


class BPETokenizer(FileTokenizer):
    """Byte-level BPE tokenizer trained on documents; it encodes any text, and decodes to the same text.

    Sennrich et al. 2016 (https://arxiv.org/abs/1508.07909) over bytes, with the pre-tokens of GPT-2.
    """

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int = 4096,
        total_bytes: int | None = None,
        progress: OnProgress = silent,
    ) -> BPETokenizer:
        """Returns a tokenizer with `vocab_size - 257` merges, learned from an iterator that is read once, in bounded
        memory.

        If a text has more than 100 MB (`total_bytes`), evenly spaced pieces are read; if the length is unknown, its
        first 100 MB. A text too small for this number of merges gives a smaller vocabulary.
        """
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        check_size("bpe", vocab_size)
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(_sample(texts, total_bytes, progress), trainer)
        return cls(library)


class WordTokenizer(FileTokenizer):
    """Tokenizer of words: the pre-tokens of byte-level BPE, each one token with the space in front of it.

    A word outside the vocabulary becomes `<unk>`.
    """

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int = 32_768,
        total_bytes: int | None = None,
        progress: OnProgress = silent,
    ) -> WordTokenizer:
        """Returns a tokenizer of the most frequent words, those that occur twice or more, of an iterator that is read
        once."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Library

        check_size("word", vocab_size)
        counted = Library(models.WordLevel(unk_token=UNKNOWN))
        counted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.WordLevelTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT, UNKNOWN], show_progress=False
        )
        counted.train_from_iterator(_sample(texts, total_bytes, progress), trainer)
        # Rebuilt, because a special token has no text, and <unk> should be visible in generated text.
        library = Library(models.WordLevel(counted.get_vocab(), unk_token=UNKNOWN))
        library.pre_tokenizer, library.decoder = counted.pre_tokenizer, decoders.ByteLevel()
        library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return cls(library, {**settings_of(END_OF_TEXT), "unk_token": UNKNOWN})


def check_size(kind: str, size: int) -> int:
    """Returns the vocabulary size `size`. Raises RequestError if a trained tokenizer of this kind cannot have it."""
    low, high = SIZES[kind]
    if not low <= size <= high:
        raise RequestError(
            f"tokenizer {kind}:{size}: the size must lie between {low} and {high}",
            code="range", field="tokenizer", value=size,
        )  # fmt: skip
    return size


def _sample(texts: Iterable[str], total: int | None, progress: OnProgress) -> Iterator[str]:
    """Yields the pieces of a text, up to TRAINING_BYTES bytes; evenly spaced pieces if the text has more (`total`), the
    first pieces if its length is unknown."""
    keep = min(1.0, TRAINING_BYTES / total) if total else 1.0
    expected = min(total, TRAINING_BYTES) if total else None
    seen = used = 0
    for text in texts:
        size = len(utf8(text))
        seen += size
        if used <= keep * seen - size / 2 and used < TRAINING_BYTES:
            used += size
            progress("training tokenizer", used, expected)
            yield text
        elif used >= TRAINING_BYTES:
            return


def byte_alphabet() -> list[str]:
    """Returns the characters in which byte-level BPE writes the bytes 0 to 255 (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 maps to itself; the other 68 bytes take the code points from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def bounded(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise RequestError(
                f"{path} has {size} bytes; such a file is refused above {limit >> 20} MiB",
                code="range", field=path.name, value=size,
            )  # fmt: skip
        return path.read_bytes()
    except OSError as problem:
        raise RequestError(
            f"{path} cannot be read ({problem.strerror or problem})", code="missing", field=path.name
        ) from problem


def _read_settings(folder: Path) -> dict[str, Any]:
    said, template = _read_mapping(folder / SETTINGS_FILE), folder / TEMPLATE_FILE
    said = token_settings.merged(said, *(_read_mapping(folder / name) for name in EARLIER_FILES))
    if template.is_file():  # written by newer programs; it overrides the settings
        try:
            said["chat_template"] = bounded(template, LARGEST_SETTINGS).decode()
        except UnicodeDecodeError as problem:
            raise RequestError(
                f"{template} is not UTF-8 text ({problem})", code="damaged", field=template.name
            ) from None
    return said


def _read_mapping(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if the file is missing or holds another value. Raises RequestError for a
    file that is not JSON."""
    if not path.is_file():
        return {}
    try:
        said = json.loads(bounded(path, LARGEST_SETTINGS))
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{path} is not JSON ({problem})", code="syntax", field=path.name) from None
    return said if isinstance(said, dict) else {}


def _special_tokens(said: dict[str, Any]) -> dict[str, str]:
    """Returns {role: token} of a tokenizer_config.json, for `bos_token`, `eos_token` and so on."""
    return {
        name: text
        for name, token in said.items()
        if name.endswith("_token") and (text := token_settings.text_of(token))
    }


def _add_named(library: Library, named: dict[str, dict[str, bool]]) -> list[str]:
    """Marks the vocabulary's tokens that the settings name as added tokens, as transformers does, so that they are
    matched in a text before any other step. Returns the named tokens that the vocabulary lacks. The model's unknown
    token is not marked, so that it is visible in an answer."""
    from tokenizers import AddedToken

    known, vocabulary = {token.content for token in library.get_added_tokens_decoder().values()}, library.get_vocab()
    missing = [text for text in named if text not in known and text != getattr(library.model, "unk_token", None)]
    library.add_tokens([AddedToken(text, **named[text]) for text in missing if text in vocabulary])
    return [text for text in missing if text not in vocabulary]


def _parsed(data: bytes, path: Path) -> Library:
    from tokenizers import Tokenizer as Library

    with one_sentence(f"{path} is not a tokenizer.json", "save one with the tokenizers library"):
        text = data.decode("utf-8")
        said = json.loads(text)
        parts = {name: said[name] for name in PARTS if said.get(name) is not None}
        for part in parts.values():
            check(part)
        # The library's notation, before it applies them.
        empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        described = json.loads(Library.from_str(json.dumps({**empty, **parts})).to_str())
        times = growth(described)
    for pattern in patterns.patterns(described):
        try:
            patterns.check(pattern)
        except (ValueError, RecursionError) as problem:
            shown = " ".join(f"{pattern[:80]!r}".split())
            raise RequestError(
                f"{path} has the pattern {shown}, which may take too long: {problem}",
                code="unsupported", field="tokenizer.json:pre_tokenizer.pattern", value=pattern,
            ) from None  # fmt: skip
    if times > LARGEST_GROWTH:
        raise RequestError(
            f"{path} may make {times:.3g} characters or tokens of one; more than {LARGEST_GROWTH} are refused",
            code="range", field="tokenizer.json:pre_tokenizer", value=times,
        )  # fmt: skip
    with one_sentence(f"{path} is not a tokenizer.json", "save one with the tokenizers library"):
        return Library.from_str(text)


@contextlib.contextmanager
def one_sentence(what: str, instead: str, code: Code = "damaged") -> Iterator[None]:
    """Raises RequestError instead of the library's exceptions inside the block: "`what` (first line of the error);
    `instead`"."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:  # a panic of the library is not an Exception
        detail = (str(problem).splitlines() or [type(problem).__name__])[0][:200]
        if not isinstance(problem, Exception):
            raise RequestError(
                f"{what}: the library that does it broke off ({detail}); use another tokenizer",
                code="failed", field="tokenizer",
            ) from None  # fmt: skip
        raise RequestError(f"{what} ({detail}); {instead}", code=code, field="tokenizer") from None


def settings_of(end: str | None) -> dict[str, Any]:
    """Returns the content of a tokenizer_config.json with which `AutoTokenizer.from_pretrained` of transformers loads
    the tokenizer.json of its folder; `end` is the end token, None without an end token."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    return {**settings, "eos_token": end} if end is not None else settings


def _write(library: Library, folder: Path, settings: dict[str, Any]) -> None:
    with atomic_file(folder / "tokenizer.json") as temporary:
        temporary.write_text(library.to_str(), encoding="utf-8")
    with atomic_file(folder / SETTINGS_FILE) as temporary:
        temporary.write_text(mended(json.dumps(settings, ensure_ascii=False, indent=2)), encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, str):
        with atomic_file(folder / TEMPLATE_FILE) as temporary:
            temporary.write_bytes(mended(template).encode())
    else:  # a template of another tokenizer would override the settings
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)
