"""THE SEAM: the operations a protocol may yield, and the drivers that carry them out. Only this
room blocks.
"""
