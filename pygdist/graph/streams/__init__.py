"""Edges as streams of bounded chunks, arrays written in blocks, and folders that are complete or absent."""
