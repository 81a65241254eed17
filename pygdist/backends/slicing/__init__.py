"""Tensor parallelism: every rank aggregates some columns of all rows over the edges of all ranks (NeutronTP)."""
