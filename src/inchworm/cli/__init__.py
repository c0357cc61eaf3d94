"""The `inchworm` command: one module per group of commands, each a thin layer over the library."""
