"""Fetches rows from their owners, group by group, and aggregates each group as it arrives."""
