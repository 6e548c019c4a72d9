"""A world of ranks that average in groups, under the virtual clock."""
