"""What runs beside training."""
