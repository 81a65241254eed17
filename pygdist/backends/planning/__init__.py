"""Measures what hops and exchanges cost, and plans by it which rows a rank computes."""
