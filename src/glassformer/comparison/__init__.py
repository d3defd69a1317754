"""Comparisons: several models trained under one budget, with paired seeds, verdicts and a report.

verbs       `compare` and `tune`
single      one model, trained: `train`
design      an experiment as a value, and as a file
arms        the models of a design, fairness, budgets and recipes
experiment  a design, carried out
tuning      a design, carried out with a learning rate for each arm; rates are chosen in `rates`
result      what was found, as a value
folder      what an earlier comparison has left in a folder
pretrained  arms that begin with the weights of a checkpoint
terms       the size, budget, text and learning rate of a verdict, in words
summary     results.json and the report, after each run
"""

from glassformer.comparison.design import Design as Design
from glassformer.comparison.result import Comparison as Comparison
from glassformer.comparison.single import train as train
from glassformer.comparison.verbs import compare as compare
from glassformer.comparison.verbs import tune as tune
