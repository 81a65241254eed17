"""Computes rows of other ranks here again, instead of fetching them."""
