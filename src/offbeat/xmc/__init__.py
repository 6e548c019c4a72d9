"""Sparse rows with very many labels: layers and optimizers for them."""
