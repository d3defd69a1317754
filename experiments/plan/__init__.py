"""Comparison of plans with published and measured figures."""
