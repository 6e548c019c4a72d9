"""Pure arithmetic: trees, groups, topologies, costs."""
