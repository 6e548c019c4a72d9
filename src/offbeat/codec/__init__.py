"""HOW it is encoded: sparse form, selection, residual, wire layout. Knows no transport."""
