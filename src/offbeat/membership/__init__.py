"""The members of a run: generations, agreement on the next one, commits for all members or none."""
