"""The pages of `glassformer studio`: models composed, costed and opened in a browser, by the library's own functions.

server      the verb: opens a port and prints the address
secret      token of a folder, kept for its next start
app         routes, behind the guard of `serving`
run_routes  routes of trainings and texts
bodies      bodies of requests, with their bounds
known       names that a request may use
desk        the one thread that answers questions about configs
files       files of the page, sent by name
frames      pages of the library in frames
kept        pages of the library, until a frame shows them
blocks      printed results as plain data
numbers     tables of numbers as plain data
gallery     published models as cards, and how two differ
compose     the choices of each part, with what they change
runs        trainings in separate processes, read from their files
tracks      curves and events of a training's runs
tail        reader of a file that grows
texts       texts that were dropped onto the page
models      models with weights, loaded when first used
look        inspection of a model that reads a text, with and without components
inside      states, and experts of each token
patching    values of one text put into another
learn       a forward pass in steps
page        files of the page: plain ES modules, and the words of each language
"""

from glassformer.studio.server import Studio, start

__all__ = ["Studio", "start"]
