"""Memory: where tensors wait that do not fit on the device, and what the machine has."""
