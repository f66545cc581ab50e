"""vLLM's n-gram and suffix drafting, replayed on finished texts."""
