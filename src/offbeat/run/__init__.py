"""A user's own script with a strategy of offbeat's: `offbeat run`, and what of it others use.

worker.py        runs the script, in a process that is one rank
patches.py       all that is changed in PyTorch meanwhile, and nothing anywhere else
coupling.py      from DistributedDataParallel and optimizers to sessions
evaluation.py    the mean of all ranks' models, where a script evaluates and saves
recording.py     the record of a script's steps
supervise.py     the workers of this host
plan.py          what is to be run, checked before anything starts
"""
