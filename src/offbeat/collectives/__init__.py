"""WITH WHOM: protocols written as generators, each with its cost."""
