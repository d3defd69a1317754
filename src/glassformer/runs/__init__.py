"""Runs: how they are asked for and trained, and what they leave.

results     the types of results.json and result.json
files       their one reader and their one writer
arms        runs that are seeds of one arm, and the quantities that are measured of them
diff        where the configs of arms differ
verdicts    the one judge: which differences between arms are shown
contrasts   differences between arms over seeds, and their intervals
simultaneous quantiles for several contrasts at once
looks       the level at which verdicts that are seen several times stay honest
power       how many seeds a difference takes
effects     effects of several changes, from a factorial design
wording     verdicts as sentences
events      what happens while runs train, as types and as lines of JSON
request     a run that is asked for: model, recipe, text
measure     a trained model -> RunResult
arm         one run, in a process of its own
owner       who trains a run, as the others see it
executor    many runs: kept where they are finished, trained where they are not
slurm       as jobs of a cluster; the executor that --executor and --slots name
"""
