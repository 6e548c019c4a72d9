"""What a strategy is made of: parts that act on events, and the context that they get."""
