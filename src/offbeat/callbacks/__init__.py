"""What a strategy is made of: callbacks that act on events, and the context that they get."""
