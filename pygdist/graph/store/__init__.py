"""Partitioned graphs on disk: ``meta.json``, files of the parts, and one module for each placement."""
