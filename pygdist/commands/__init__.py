"""The commands of ``pygdist``, one file each."""
