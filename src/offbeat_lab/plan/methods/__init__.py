"""What each strategy does in a step, and what it costs: generators of training where there are
messages, closed forms of the same collectives (`cost_s`) beyond `simulation.EVENTS_UP_TO` workers.
"""
