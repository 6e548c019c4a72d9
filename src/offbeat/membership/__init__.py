"""Who is in a run: generations of members, agreement on the next, commits for all or none."""
