"""Runs: how they are asked for and trained, and what they leave.

results     the types of results.json and result.json
files       their one reader and their one writer
readable    the same types from a file that may be damaged, for pages
events      what happens while runs train, as types and as lines of JSON
request     a run that is asked for: model, recipe, text
measure     a trained model -> RunResult
arm         one run, in a process of its own
owner       who trains a run, as the others see it
executor    many runs: kept where they are finished, trained where they are not
slots       several at once on this machine, one on each device
slurm       as jobs of a cluster
where       what --executor and --slots name
"""
