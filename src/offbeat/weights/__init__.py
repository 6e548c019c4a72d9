"""What all that averages weights stands on: model vectors, staging, rows, momenta."""
