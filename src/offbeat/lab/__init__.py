"""Local runs: tasks, workers, supervisor, records."""
