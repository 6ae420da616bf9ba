"""What a person or a program reads about a run after it. Measures nothing itself."""
