"""What engines tell of their KV caches, by vLLM's `--kv-events-config`."""
