"""The command line: parses, calls the library, prints. Torch is imported only by the verb that computes."""

from glassformer.cli import start as start  # first, since it reads the clock
from glassformer.cli.program import app as app
from glassformer.cli.program import main as main
