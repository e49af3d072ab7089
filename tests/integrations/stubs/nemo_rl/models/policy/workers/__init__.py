"""Workers of policies."""
