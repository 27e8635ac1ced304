"""The plans: which roles there are, what moves between them, and who waits for whom. A page each."""
