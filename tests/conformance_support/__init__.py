"""What the conformance suites share."""
