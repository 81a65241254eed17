"""The parts of a graph on disk."""
