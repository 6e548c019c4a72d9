"""A slow reference for K-FAC's steps."""
