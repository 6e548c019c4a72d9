"""K-FAC: the mathematics of Kronecker factors, their exchange, and its planning."""
