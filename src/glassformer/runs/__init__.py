"""Runs: their requests, their training, and their results.

results     the types of results.json and result.json
files       their one reader and their one writer
arms        runs that are seeds of one arm, and their measured quantities
diff        differences between the configs of arms
verdicts    decisions on differences between arms, the only source of "better"
contrasts   differences between arms over seeds, and their intervals
simultaneous quantiles for several contrasts at once
looks       the level for verdicts that are seen several times
power       the number of seeds that shows a difference
effects     effects of several changes, from a factorial design
wording     verdicts as sentences
events      events of training, as types and as lines of JSON
request     request of a run: model, recipe, text
measure     a trained model -> RunResult
arm         one run, in a separate process
owner       the process that trains a run
executor    many runs: finished ones are kept, others trained
slurm       executor of runs as jobs of a cluster, and the parsing of --executor and --slots
"""
