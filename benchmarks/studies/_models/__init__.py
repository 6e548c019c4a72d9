"""Models of time that benchmarks hold measurements against."""
