"""Which factors travel together, who inverts them, and in which order."""
