"""Factors, inverses and preconditioned gradients on their way between ranks."""
