"""Data for extreme classification: sparse rows, their files, a generator, layers, optimizers and
metrics.
"""
