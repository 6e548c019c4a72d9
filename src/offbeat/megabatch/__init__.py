"""Adaptive SGD: batches claimed by speed, and models merged after each mega-batch."""
