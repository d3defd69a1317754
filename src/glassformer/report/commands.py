"""The recorded command with another option: what a reader copies to get what this page does not show."""

from __future__ import annotations

import re

LONGEST = 400  # characters of a command that is repeated
GIVEN_RATE = re.compile(r" --(lr|learning-rate)[ =]|recipe\.learning_rate=")


def with_seeds(command: object) -> str:
    """The recorded command, or call in Python, with three seeds; without one, the option alone."""
    if not _usable(command):
        return "--seeds 3"
    command = re.sub(r" --power[ =]\S+|, power=[\d.e-]+", "", str(command))
    asked, found = re.subn(r"( --seeds[ =]|, seeds=)\d+(?=[\s,)]|$)", r"\g<1>3", command)
    return asked if found else f"{command} --seeds 3"


def watching(command: object) -> str:
    """The recorded command with --watch, into a folder of its own: what has been trained is not watched afterwards."""
    if not _usable(command) or not str(command).startswith("glassformer"):
        return "--watch"
    return re.sub(r"( --out[ =])(\S*[^\s/'\"])", r"\g<1>\g<2>-watched", str(command), count=1) + " --watch"


def tuned(command: object) -> str:
    """The recorded command with --tune, into a folder of its own; the option alone where a rate is given in it."""
    if not _usable(command) or not str(command).startswith("glassformer") or GIVEN_RATE.search(str(command)):
        return "--tune"
    several = re.sub(r" --seeds[ =]1(?=\s|$)", "", str(command))  # one has no verdict; without the option, three
    return re.sub(r"( --out[ =])(\S*[^\s/'\"])", r"\g<1>\g<2>-tuned", several, count=1) + " --tune"


def _usable(command: object) -> bool:
    return isinstance(command, str) and bool(command.strip()) and len(command) <= LONGEST
