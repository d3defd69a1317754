"""The page that a comparison leaves: one HTML file that opens offline, prints, and carries its own data.

`render(results)` is the page as text, `write_report(results, path)` puts it on disk in one move. The input
is what `results.json` holds (`runs.results.Results`); every string is taken for words, never for markup.
"""

from __future__ import annotations

from .page import render, write_report, write_run

__all__ = ["render", "write_report", "write_run"]
