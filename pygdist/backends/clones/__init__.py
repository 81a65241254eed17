"""Rows of one node in several parts (DistGNN): sums, extrema and softmax over them, at once or with a delay."""
