"""Pure arithmetic: trees, fusion, ownership, costs."""
