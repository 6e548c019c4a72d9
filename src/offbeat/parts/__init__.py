"""What a strategy is made of: parts that act on events, and the workspace that they get."""
