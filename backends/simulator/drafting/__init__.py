"""What a simulated replica's drafts get accepted."""
