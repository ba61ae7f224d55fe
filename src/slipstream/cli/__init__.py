"""The `slipstream` command: one file per command, all heavy imports inside the functions."""
