"""Graphs made by name, at any size."""
