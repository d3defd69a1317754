"""Version of the package. This module imports nothing, so that all others may import it."""

__version__ = "0.2.0"
