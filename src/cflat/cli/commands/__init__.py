"""The commands: one small file each, with a function `command` and its ``EXAMPLES`` for the help."""
