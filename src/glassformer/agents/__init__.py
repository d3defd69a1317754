"""Verbs as tools of the Model Context Protocol, for agents.

tools         arguments and results of each tool
comparisons   the folder of comparisons, and the one that is computed
stdio         the server, with the `mcp` package
"""

from glassformer.agents.stdio import serve_tools

__all__ = ["serve_tools"]
