"""Frameworks whose training loop is not the user's: each file is an extra, and imports its
framework when it is imported itself.

lightning.py      Lightning's Trainer and Fabric
transformers.py   the Trainer of transformers
accelerate.py     loops with Accelerate
framework.py      a session in a loop of someone else's; DistributedDataParallel told to be quiet
state_files.py    a session's state beside the framework's own checkpoint
"""
