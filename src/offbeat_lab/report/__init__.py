"""Records in; pages, traces and curves out."""
