"""Generators of random graphs, chosen by name, at any size."""
