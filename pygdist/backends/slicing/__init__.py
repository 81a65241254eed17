"""Gives every rank some columns of all rows."""
