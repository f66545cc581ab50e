"""`gateway bench`: measures an OpenAI-compatible endpoint, or each replica of a pool, under load."""
