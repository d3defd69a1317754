"""Distributed training: division of a step among processes, their groups, and their communication."""
