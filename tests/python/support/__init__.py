"""What several tests share. Tests import from here, and never from each other."""
