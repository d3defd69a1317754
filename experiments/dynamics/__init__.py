"""Published claims about training dynamics, each an experiment with a figure and a verdict, minutes on two cores.

>>> python -m experiments.dynamics all
>>> python -m experiments.dynamics entropy_bound --quick
"""
