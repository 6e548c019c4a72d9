"""Data for extreme classification: sparse rows, how their files are read, layers, optimizers
and metrics.
"""
