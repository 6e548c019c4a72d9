"""Strategies as they train, with weightless tensors under a virtual clock."""
