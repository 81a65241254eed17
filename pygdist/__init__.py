"""Distributed training of unmodified PyTorch Geometric models on graphs that outgrow one machine."""
