"""Averages that a thread beside training takes part in: WAGMA, AD-PSGD, eager SGD."""
