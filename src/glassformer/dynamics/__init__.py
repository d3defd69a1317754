"""What to watch while a model trains: statistics as pure functions, monitors, and what a failed run died of."""
