"""Graphs from any source, in memory or as streams, checked and put into one form."""
