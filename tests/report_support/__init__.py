"""What tests of the report share: records made up to order, and a browser without a screen."""
