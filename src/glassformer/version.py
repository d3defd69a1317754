"""The version of the package; the first room of the house, so that every other may name it."""

__version__ = "0.2.0"
