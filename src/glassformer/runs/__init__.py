"""Runs: their requests, their training, and their results.

results     the types of results.json and result.json
files       the one reader and the one writer of these files
arms        runs that are seeds of one arm, and their measured quantities
diff        differences between the configs of arms
verdicts    decisions on differences between arms, the only source of "better"
contrasts   differences between arms over seeds, and their intervals
simultaneous quantiles for several contrasts at once
looks       the level of significance for verdicts that are seen several times
power       the number of seeds that shows a difference
effects     effects of several changes, from a factorial design
wording     verdicts as sentences
events      events of training, as types and as lines of JSON
request     request of a run: model, recipe, text
measure     measures of a trained model, as a RunResult
answers     answers of a trained model to held-out sources
arm         program of a process that trains runs
workers     processes that train runs, and the pool of idle ones
live        progress on standard error
executor    many runs: finished ones are kept, others trained
slurm       executor of runs as jobs of a cluster, and the parsing of --executor and --slots
"""
