"""Comparisons: several models trained under one budget, with paired seeds, verdicts and a report.

experiment  the whole of it: `compare`
request     arms from expressions, fairness, budgets and recipes
folder      what an earlier comparison has left in a folder
pretrained  arms that begin with the weights of a checkpoint
terms       the size, budget, text and learning rate of a verdict, in words
summary     results.json and the report, after each run
single      one model, trained
command     the command line that repeats a comparison
"""

from glassformer.comparison.experiment import compare as compare
from glassformer.comparison.single import train as train
