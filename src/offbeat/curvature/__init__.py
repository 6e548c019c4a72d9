"""K-FAC's mathematics: Kronecker factors, inverses, preconditioning. Pure tensors."""
