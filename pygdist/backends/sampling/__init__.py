"""Mini-batches that cross the parts of a graph."""
