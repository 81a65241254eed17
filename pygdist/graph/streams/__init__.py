"""Edges as streams, and folders that are whole or absent."""
