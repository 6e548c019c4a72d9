"""WHAT moves between ranks, and when."""
