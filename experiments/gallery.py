"""Cards of the published models for the studio's first page, which is drawn before torch is imported.

>>> python -m experiments.gallery
"""

from __future__ import annotations

import json
from pathlib import Path

import glassformer
from glassformer.files import replace_text
from glassformer.studio.gallery import gallery

CARDS = Path(glassformer.__file__).parent / "studio" / "page" / "gallery.json"


def text() -> str:
    """Returns the file's text: one card a line."""
    found = gallery()
    cards = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found["cards"])
    filters = json.dumps(found["filters"], ensure_ascii=False)
    return f'{{"filters": {filters},\n"cards": [\n{cards}\n]}}\n'


if __name__ == "__main__":
    replace_text(CARDS, text())
