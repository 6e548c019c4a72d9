"""Several ranks in one process, each in a thread: for what needs peers but no processes."""
