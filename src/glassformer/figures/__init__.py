"""Figures from plain data: every function takes numbers and text and returns SVG or HTML as text.

The package imports nothing else from Glassformer, so that pages, notebooks and the studio can use it. The figures are
complete without JavaScript; `script()` adds reading values by hover and arrow keys, switching arms off in a legend, and
sorting tables. A page needs `stylesheet()` once, and optionally `script()`; `document()` makes a page with both.
"""

from __future__ import annotations

from .against import against_row
from .bars import node_drawing, part_swatch, stacked_bar
from .chart import Axis
from .document import copyable, document, embedded, script, stylesheet, write_document
from .heat import HeatColumn, HeatScale, Mark, heat_legend, heat_map, heat_scale, is_not_finite
from .intervals import interval_axis, interval_domain, interval_row
from .levels import level_axis, level_domain, level_row
from .lines import Series, legend, line_chart
from .loop import LoopSketch, loop_drawing
from .markup import Markup, breakable, escape, join, plain_table, tag
from .numbers import count, days, finite, fixed, log_ticks, nice_ticks, seconds, si, tick_labels, with_sign
from .scatter import Dot, scatter_chart
from .style import swatch
from .wiring import BlockSketch, Box, ModelSketch, StageSketch, wiring_drawing

__all__ = [
    "Axis", "BlockSketch", "Box", "Dot", "HeatColumn", "HeatScale", "LoopSketch", "Mark", "Markup", "ModelSketch",
    "Series", "StageSketch", "against_row", "breakable", "copyable", "count", "days", "document", "embedded", "escape",
    "finite", "fixed", "heat_legend", "heat_map", "heat_scale", "interval_axis", "interval_domain", "interval_row",
    "is_not_finite", "join", "legend", "level_axis", "level_domain", "level_row", "line_chart", "log_ticks",
    "loop_drawing", "nice_ticks", "node_drawing", "part_swatch", "plain_table", "scatter_chart", "script", "seconds",
    "si", "stacked_bar", "stylesheet", "swatch", "tag", "tick_labels", "wiring_drawing", "with_sign", "write_document",
]  # fmt: skip
