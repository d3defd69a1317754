"""Processes that share a training step: how they divide it, who they are, and what they tell each other."""
