"""Page of a comparison: one HTML file that opens offline, prints, and contains its data.

`render(results)` returns the page as text, `write_report(results, path)` writes it atomically. The input is the content
of `results.json` (`runs.results.Results`); strings are treated as text, never as markup.
"""

from __future__ import annotations

from .page import render, write_report, write_run

__all__ = ["render", "write_report", "write_run"]
