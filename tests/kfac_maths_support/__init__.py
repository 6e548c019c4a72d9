"""What the tests of K-FAC's mathematics share."""
