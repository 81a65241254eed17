"""Measures what hops cost here and predicts what an epoch takes."""
