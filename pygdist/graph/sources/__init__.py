"""Reads a graph from any source and puts it into one checked form."""
