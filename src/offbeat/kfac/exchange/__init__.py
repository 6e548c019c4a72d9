"""What K-FAC sends: factors, inverses and preconditioned gradients, and in which order."""
