"""Which strategy, on which cluster: predicted from a profile of the model and a description of the
cluster.
"""
