"""Says what the model runs on now: the part, a rehearsal on a few nodes, or a mini-batch."""
