"""Gradients: buckets, their exchange during backward, and how a bucket becomes a mean."""
