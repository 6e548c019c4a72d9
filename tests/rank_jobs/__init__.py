"""What several files of tests have ranks do, and what such jobs are made of."""
