"""Computes rows of other ranks' nodes on this rank, instead of fetching these rows."""
