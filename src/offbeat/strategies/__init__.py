"""One file a system. A strategy is a recipe of four choices; `base` says which, and `registry` is
the table of all strategies.
"""

from offbeat.strategies.registry import REGISTRY

__all__ = ["REGISTRY"]
