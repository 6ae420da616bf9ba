"""The commands of `cast-ray`, a module each. They know options and printing; the rooms below do the work."""

# Of a command that was interrupted, as of one that SIGINT ended.
EXIT_INTERRUPTED = 130
