from glassformer.cli import entry

entry()
