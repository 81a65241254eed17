"""Memory: spill storage for tensors that do not fit on the device, and the memory that the machine has."""
