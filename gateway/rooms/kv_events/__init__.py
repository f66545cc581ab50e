"""Events that engines publish about their KV caches, by vLLM's `--kv-events-config`."""
