"""What each strategy does in a step, and what it costs: by its own callbacks (`strategy_steps`),
or by the generators of training where a method is described here.
"""
