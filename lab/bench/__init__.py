"""`gateway bench`: load on an OpenAI-compatible endpoint or on each replica of a pool, and what came of it."""
