"""What a person or a program reads about runs, and trials of whole engines: sweeps, acceptance, one round explained."""
