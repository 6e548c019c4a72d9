"""The fault matrix: each strategy under each fault, as real processes, against what is promised.

`python -m chaos_support` (which `make chaos` calls) runs it.
"""
