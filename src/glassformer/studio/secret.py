"""Token of a studio, kept for the next start with the same folder, so that an open page continues."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from glassformer.errors import RequestError, WorkError
from glassformer.files import atomic_file, cache_folder

TOKEN = re.compile(r"[A-Za-z0-9_-]{32}")
"""Pattern of a token: 24 random bytes in the characters of addresses."""


def token_file(folder: Path) -> Path:
    """Returns the path of the file with a folder's token, in the cache, because a folder of trainings may be shared."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_folder() / "studio" / name


def token_of(folder: Path) -> str:
    """Returns the token of a folder: that of the last start, or a new one, if its file is missing or if others can read
    it. Where the cache cannot be written, every start has a new one."""
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # no home folder
        file = token_file(folder)
        if _is_private(file):
            text = file.read_text(encoding="ascii").strip()
            if TOKEN.fullmatch(text):
                return text
    token = secrets.token_urlsafe(24)
    with (
        suppress(OSError, RuntimeError, WorkError, RequestError),
        atomic_file(token_file(folder), private=True) as file,
    ):
        file.write_text(token, encoding="ascii")
    return token


def _is_private(file: Path) -> bool:
    facts = os.lstat(file)
    if not stat.S_ISREG(facts.st_mode):
        return False
    return os.name == "nt" or (facts.st_uid == os.getuid() and not facts.st_mode & 0o077)
