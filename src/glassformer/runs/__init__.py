"""Runs: what they leave, as types.

results     the types of results.json and result.json
files       their one reader and their one writer
readable    the same types from a file that may be damaged, for pages
"""
