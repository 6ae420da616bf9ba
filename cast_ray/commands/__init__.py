"""The commands of `cast-ray`, a module each. They know options and printing; the rooms below do the work."""
