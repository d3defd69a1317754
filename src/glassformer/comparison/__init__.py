"""Comparisons: several models trained under one budget, with paired seeds, verdicts and a report.

verbs       `compare` and `tune`
single      `train`, for one model
design      an experiment as a value, and as a file
arms        the models of a design, fairness, budgets and recipes
experiment  trains the arms of a design
tuning      trains the arms of a design at the best learning rate of each, which `rates` chooses
result      `Comparison`, the results as a value
folder      checks of the output folder for an earlier comparison
pretrained  arms that start from the weights of a checkpoint
terms       the size, budget, text and learning rate of a verdict, in words
summary     results.json and the report, after each run
"""

from glassformer.comparison.design import Design as Design
from glassformer.comparison.result import Comparison as Comparison
from glassformer.comparison.single import train as train
from glassformer.comparison.verbs import compare as compare
from glassformer.comparison.verbs import tune as tune
