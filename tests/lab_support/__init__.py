"""What tests of the lab share: runs and comparisons made by hand, small enough to know what they
should come to.
"""
