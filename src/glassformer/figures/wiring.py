"""Drawing of a model's wiring, from the bottom up: the residual stream is the trunk, parts are boxes next to it.

pre        trunk ──┬── norm ─ part ──⊕──        the trunk stays clean
post       trunk ──┬── part ─────────⊕── norm   every layer normalises the trunk itself
sandwich   trunk ──┬── norm ─ part ─ norm ──⊕──
res_post   trunk ──┬── part ─ norm ──⊕──
parallel   trunk ──┬── norm ─ mixer | ffn ──⊕── both read the same input

A model with an encoder has two trunks next to each other; a line leads from the encoder's output to the parts that read
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .chart import shorten
from .markup import Markup, join, number, tag

WIDTH = 300
GAP = 34
"""Space in pixels between the drawings of encoder and decoder, for the line of the encoder's output."""
TRUNK = 50.0
BRANCH_LEFT, BRANCH_RIGHT = 92.0, 276.0
BRANCH = (BRANCH_LEFT + BRANCH_RIGHT) / 2
Place = tuple[int | str, ...]
KNOWN = ("pre", "post", "sandwich", "res_post", "parallel", "no_residual")


@dataclass(frozen=True)
class Box:
    """A part of a model in the drawing: its name, its details in small type, and the name of what acts `inside` it,
    such as a rotary position.

    `whole`, which is not drawn, holds all details, since a narrow box has less room for `detail`."""

    name: str
    detail: str = ""
    inside: str = ""
    whole: str = ""
    reads_memory: bool = False
    """True if the part reads the output of an encoder."""


@dataclass(frozen=True)
class BlockSketch:
    """One block of the drawing: its wiring and its parts; `times` is the number of equal blocks in a row.

    `shared_norm` is True if the two branches of a parallel block read the same norm; `mixer_normed` is False if the
    mixer of a pre block reads the trunk without a norm.
    """

    wiring: str = "pre"
    norm: str = ""
    mixer: Box | None = None
    ffn: Box | None = None
    times: int = 1
    shared_norm: bool = True
    mixer_normed: bool = True


@dataclass(frozen=True)
class StageSketch:
    """Blocks of the drawing that are repeated together, `repeat` times; `hidden` is the number of blocks left out."""

    repeat: int = 1
    blocks: Sequence[BlockSketch] = field(default_factory=tuple)
    hidden: int = 0


@dataclass(frozen=True)
class ModelSketch:
    """A whole model to draw; `position` names the position encoding that is added to the embedding, "" without one;
    `reads` and `gives` name the input and the output."""

    embedding: Box | None = None
    position: str = ""
    stages: Sequence[StageSketch] = field(default_factory=tuple)
    final_norm: str = ""
    head: Box | None = None
    embedding_norm: str = ""
    reads: str = "tokens"
    gives: str = "logits"
    encoder: ModelSketch | None = None
    """Encoder whose output parts of this model read; None without an encoder."""
    differs: frozenset[Place] = frozenset()
    """Places marked as different: ("final_norm",), (stage, "repeat"), (stage, block, "mixer"), ..."""


class _Pen:
    """Collector of the shapes of one tower (an encoder or a decoder), drawn upwards from y = 0; `y` is the level
    reached so far in pixels, negative and decreasing."""

    def __init__(self, within: Place | None = None) -> None:
        self.within = within
        """Steps that precede every place in the attribute data-place; None for a drawing without this attribute."""
        self.pieces: list[Markup] = []
        self.y = 0.0
        self.readers: list[tuple[float, float]] = []
        """Middle (x, y) of the left edge of each part that reads the encoder's output."""

    def put(self, *pieces: Markup) -> None:
        self.pieces += pieces

    def line(self, *points: tuple[float, float], arrow: bool = False) -> None:
        d = "".join(f"{'L' if i else 'M'}{number(x)},{number(y)}" for i, (x, y) in enumerate(points))
        self.put(tag("path", d=d, class_="gf-wire"))
        if arrow:
            x, y = points[-1]
            self.put(
                tag(
                    "path",
                    d=f"M{number(x - 4)},{number(y + 6)}L{number(x)},{number(y)}l4,6",
                    class_="gf-arrow",
                )
            )

    def rise(self, height: float, arrow: bool = False) -> None:
        """Draws the trunk `height` pixels upwards."""
        self.line((TRUNK, self.y), (TRUNK, self.y - height), arrow=arrow)
        self.y -= height

    def add(self, y: float) -> None:
        """Draws a circled plus on the trunk, for an addition."""
        cross = f"M{number(TRUNK - 5)},{number(y)}h10M{number(TRUNK)},{number(y - 5)}v10"
        self.put(tag("circle", cx=TRUNK, cy=y, r=9.0, class_="gf-plus"), tag("path", d=cross, class_="gf-wire"))

    def text(self, words: str, x: float, y: float, kind: str, anchor: str = "middle", place: str | None = None) -> None:
        self.put(tag("text", words, x=x, y=y, class_=kind, text_anchor=anchor, data_place=place))

    def badge(self, x: float, y: float) -> None:
        """Draws a circled ≠, the mark of a difference, centred at (x, y)."""
        self.put(tag("circle", cx=x, cy=y, r=8.0, class_="gf-badge"))
        self.text("≠", x, y + 4.5, "gf-badge-sign")

    def place(self, *steps: int | str) -> str | None:
        """Returns the value of a part's attribute data-place, such as "0.1.mixer"; None for a drawing without this
        attribute."""
        return None if self.within is None else ".".join(map(str, (*self.within, *steps)))

    def box(self, box: Box, role: str, left: float, right: float, y: float, height: float,
            differs: bool = False, at: str = "") -> None:  # fmt: skip
        """Draws the box of a part whose lower edge is at y; `at` is its place in the block, such as "mixer"."""
        letters = max(6, int((right - left) / 6.6))
        top, middle = y - height, (left + right) / 2
        self.put(
            tag(
                "rect",
                tag("title", " ".join(filter(None, [box.name, box.detail, box.inside]))),
                x=left,
                y=top,
                width=right - left,
                height=height,
                rx=6.0,
                class_=f"gf-box gf-{role}{' gf-changed' * differs}",
                data_place=self.place(at or role),
            )
        )
        if differs:
            self.badge(right - 3, top + 3)
        if box.reads_memory:
            self.readers.append((left, y - height / 2))
        base = top + (16.0 if box.detail or box.inside else height / 2 + 4)
        self.text(shorten(box.name, letters), middle, base, "gf-part")
        if box.detail:
            self.text(shorten(box.detail, letters + 2), middle, base + 14, "gf-detail")
        if box.inside:
            chip = y - 25
            self.put(tag("rect", x=left + 8, y=chip, width=right - left - 16, height=19.0, rx=9.5, class_="gf-chip"))
            self.text(shorten(box.inside, letters), middle, chip + 13.5, "gf-detail")


def _height(box: Box) -> float:
    """Returns the height in pixels that a part's text needs."""
    return 26.0 + (13.0 if box.detail else 0.0) + (25.0 if box.inside else 0.0)


def wiring_drawing(model: ModelSketch, title: str, places: bool = False) -> Markup:
    """Draws the model as one SVG, tokens at the bottom and logits at the top, an encoder to the left. With `places`,
    each part has the attribute data-place, such as "0.1.mixer", so that a page can make it a button."""
    pen = _drawn(model, model.differs, () if places else None)
    top, width, towers = 20 - pen.y, WIDTH, [pen]
    if model.encoder is not None:
        marks = frozenset(place[1:] for place in model.differs if place[0] == "encoder")
        source = _drawn(model.encoder, marks, ("encoder",) if places else None)
        top, width, towers = max(top, 20 - source.y), 2 * WIDTH + GAP, [source, pen]
        _memory(source, pen)
    body = [
        tag("g", join(one.pieces), transform=f"translate({i * (WIDTH + GAP)},{number(top)})")
        for i, one in enumerate(towers)
    ]
    return tag("svg", join(body), class_="gf-wiring", viewBox=f"0 0 {width} {number(top + 4)}", width=width,
               height=round(top + 4), role="group" if places else "img", aria_label=title)  # fmt: skip


def _drawn(model: ModelSketch, marks: frozenset[Place], within: Place | None = None) -> _Pen:
    """Draws one tower (an encoder or a decoder) and returns its shapes; `marks` are the places that differ."""
    pen = _Pen(within)
    pen.text(model.reads, TRUNK, -4.0, "gf-detail")
    pen.y = -12.0
    _on_trunk(pen, model.embedding or Box("embedding"), "trunk", BRANCH_RIGHT, ("embedding",) in marks, "embedding")
    if model.position:
        _added_position(pen, model.position, ("position",) in marks)
    if model.embedding_norm:
        _on_trunk(pen, Box(model.embedding_norm), "norm", 150.0, ("embedding_norm",) in marks, "embedding_norm")
    for i, stage in enumerate(model.stages):
        _stage(pen, stage, frozenset(place[1:] for place in marks if place[0] == i), i)
    if model.final_norm:
        _on_trunk(pen, Box(model.final_norm), "norm", 150.0, ("final_norm",) in marks, "final_norm")
    if model.head:
        _on_trunk(pen, model.head, "trunk", BRANCH_RIGHT, ("head",) in marks, "head")
    pen.rise(16, arrow=True)
    pen.text(model.gives, TRUNK, pen.y - 6, "gf-detail")
    return pen


def _memory(source: _Pen, pen: _Pen) -> None:
    """Draws the line from the top of the encoder, `source`, to the parts of the decoder, `pen`, that read its
    output."""
    channel, start = -GAP / 2.0, source.y + 4
    source.line((TRUNK + 10, source.y + 4), (WIDTH + GAP / 2.0, source.y + 4))
    for x, y in pen.readers:
        pen.line((channel, start), (channel, y), (x - 7, y))
        pen.put(tag("path", d=f"M{number(x - 7)},{number(y - 4)}l6,4l-6,4", class_="gf-arrow"))


def _on_trunk(pen: _Pen, box: Box, role: str, right: float, differs: bool = False, at: str = "") -> None:
    """Draws the box of a part that the trunk passes through; its right edge is at x = `right`."""
    pen.rise(16, arrow=True)
    height = _height(box)
    pen.box(box, role, 10.0, right, pen.y, height, differs, at)
    pen.y -= height


def _added_position(pen: _Pen, words: str, differs: bool) -> None:
    """Draws the position encoding that is added to the embedding, named `words`."""
    pen.rise(40)
    y = pen.y + 20
    left, right = BRANCH_LEFT, BRANCH_RIGHT
    pen.line((left, y), (TRUNK + 9, y))
    pen.put(tag("rect", x=left, y=y - 11, width=right - left, height=22.0, rx=11.0,
                class_="gf-chip gf-changed" if differs else "gf-chip", data_place=pen.place("position")))  # fmt: skip
    if differs:
        pen.badge(right - 3, y - 9)
    pen.text(shorten(words, 27), (left + right) / 2, y + 4, "gf-detail")
    pen.add(y)


def _stage(pen: _Pen, stage: StageSketch, marks: frozenset[Place], index: int) -> None:
    """Draws the blocks of a stage in a frame with the number of repeats; `index` is the stage's number in the model."""
    pen.rise(14)
    bottom, before = pen.y, len(pen.pieces)
    for j, block in enumerate(stage.blocks):
        here = frozenset(str(place[1]) for place in marks if place[0] == j)
        own = pen.within
        pen.within = own if own is None else (*own, index, j)
        _block(pen, block, here, alone=len(stage.blocks) == 1)
        pen.within = own
    if stage.hidden:
        pen.rise(30)
        pen.text(f"and {stage.hidden} more blocks", BRANCH, pen.y + 19, "gf-detail")
    pen.rise(30)
    frame = tag("rect", x=6.0, y=pen.y, width=float(WIDTH - 12), height=bottom - pen.y, rx=10.0, class_="gf-stage")
    pen.pieces.insert(before, frame)
    times = f"≠ × {stage.repeat}" if ("repeat",) in marks else f"× {stage.repeat}"
    pen.text(times, WIDTH - 18.0, pen.y + 20, "gf-times", "end", pen.place(index, "repeat"))
    if len(stage.blocks) == 1:
        differs = (0, "wiring") in marks
        words = ("≠ " if differs else "") + _wiring_words(stage.blocks[0])
        kind = "gf-detail gf-changed" if differs else "gf-detail"
        pen.text(words, BRANCH_LEFT - 8, pen.y + 20, kind, "start", pen.place(index, 0, "wiring"))


def _wiring_words(block: BlockSketch) -> str:
    """Returns the name of a block's wiring as a caption, with a remark if the wiring is unknown and drawn as pre."""
    known = block.wiring in KNOWN
    return f"{shorten(block.wiring, 14)} wiring" if known else f"{shorten(block.wiring, 12)} (drawn as pre)"


def _block(pen: _Pen, block: BlockSketch, marks: frozenset[str], alone: bool) -> None:
    """Draws one block, with a caption unless it is `alone` in its stage; `marks` names the parts that differ."""
    bottom, before = pen.y, len(pen.pieces)
    pen.rise(10)
    if block.wiring == "parallel" and block.mixer and block.ffn:
        _parallel(pen, block, block.mixer, block.ffn, marks)
    else:
        for part, role in ((block.mixer, "mixer"), (block.ffn, "ffn")):
            if part:
                _sublayer(pen, block, part, role, marks)
    if not alone:
        pen.rise(20)
        pen.text("≠ " * ("wiring" in marks) + _wiring_words(block) + (f", × {block.times}" if block.times > 1 else ""),
                 BRANCH_RIGHT, pen.y + 14, "gf-detail", "end", pen.place("wiring"))  # fmt: skip
        edge = tag("rect", x=12.0, y=pen.y + 1, width=float(WIDTH - 24), height=bottom - pen.y - 2, rx=8.0,
                   class_="gf-block")  # fmt: skip
        pen.pieces.insert(before, edge)


def _sublayer(pen: _Pen, block: BlockSketch, part: Box, role: str, marks: frozenset[str]) -> None:
    """Draws a mixer or an FFN on its branch, with the norms where the wiring has them."""
    post = block.wiring == "post"
    start = y = pen.y
    norm, other = "" if role == "mixer" and not block.mixer_normed else block.norm, "norm" in marks
    y = _branch_up(pen, start, y - 12)
    if norm and block.wiring not in ("post", "res_post"):
        y = _branch_box(pen, Box(norm), "norm", y, other)
    y = _branch_box(pen, part, role, y, role in marks)
    if norm and block.wiring in ("sandwich", "res_post"):
        y = _branch_box(pen, Box(norm), "norm", y, other)
    if block.wiring == "no_residual":
        _become_trunk(pen, y)
    else:
        _join_trunk(pen, y, start)
    if norm and post:
        _on_trunk(pen, Box(norm), "norm", BRANCH_LEFT + 30, other)
        pen.rise(10)


def _branch_up(pen: _Pen, start: float, y: float) -> float:
    """Draws the start of a branch, from the trunk at `start` up to `y`, and returns y."""
    pen.put(tag("circle", cx=TRUNK, cy=start, r=2.6, class_="gf-joint"))
    pen.line((TRUNK, start), (BRANCH, start), (BRANCH, y), arrow=True)
    return y


def _branch_box(pen: _Pen, box: Box, role: str, y: float, differs: bool) -> float:
    """Draws a part on the branch with its lower edge at y and a short line above the part; returns the y of the line's
    upper end."""
    height = _height(box)
    pen.box(box, role, BRANCH_LEFT, BRANCH_RIGHT, y, height, differs)
    pen.line((BRANCH, y - height), (BRANCH, y - height - 10))
    return y - height - 10


def _become_trunk(pen: _Pen, y: float) -> None:
    """Draws the branch from y back to the place of the trunk, which it replaces (a block without residual)."""
    pen.line((BRANCH, y), (TRUNK, y), (TRUNK, y - 20))
    pen.y = y - 20


def _join_trunk(pen: _Pen, y: float, start: float, branch: float = BRANCH) -> None:
    """Draws the branch from x = `branch` back to the trunk at height `y`, an addition, and the trunk from `start` up to
    the addition."""
    pen.line((branch, y), (TRUNK + 9, y))
    pen.line((TRUNK, start), (TRUNK, y - 20))
    pen.add(y)
    pen.y = y - 20


def _parallel(pen: _Pen, block: BlockSketch, mixer: Box, ffn: Box, marks: frozenset[str]) -> None:
    """Draws mixer and FFN next to each other: both read the same input, through one norm or one each, and one sum adds
    both."""
    start = pen.y
    y = _branch_up(pen, start, start - 12)
    if block.norm and block.shared_norm:
        y = _branch_box(pen, Box(block.norm), "norm", y, "norm" in marks)
    half = (BRANCH - 5.0 - BRANCH_LEFT) / 2
    centres = BRANCH_LEFT + half, BRANCH_RIGHT - half
    height = max(_height(mixer), _height(ffn))
    for x, part, role in zip(centres, (mixer, ffn), ("mixer", "ffn"), strict=True):
        top = y - 10
        pen.line((BRANCH, y), (x, y), (x, top), arrow=True)
        if block.norm and not block.shared_norm:
            pen.box(Box(block.norm), "norm", x - half, x + half, top, 26.0, "norm" in marks)
            pen.line((x, top - 26), (x, top - 36))
            top -= 36
        pen.box(part, role, x - half, x + half, top, height, role in marks)
        pen.line((x, top - height), (x, top - height - 10))
    _join_trunk(pen, top - height - 10, start, branch=centres[1])
