"""The pages of `glassformer studio`: models composed, costed and opened in a browser, by the library's own functions.

server    the verb: opens a port and prints the address
app       routes, behind the guard of `serving`
desk      the one thread that answers questions about configs
known     names that a request may use
blocks    printed results as plain data
gallery   published models as cards, and how two differ
runs      trainings in separate processes, read from their files
compose   the choices of each part, with what they change
page      files of the page: plain ES modules, and the words of each language
"""

from glassformer.studio.server import Studio, start

__all__ = ["Studio", "start"]
