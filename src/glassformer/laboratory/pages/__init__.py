"""Pages of ladders, scaling laws and claims, drawn from their typed results."""
