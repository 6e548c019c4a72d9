"""What tests share: real ranks in processes of their own, and the search for what a test leaves
behind.
"""
