"""How replicas served the requests of a trace: step times fitted to it, and the replay that tests them."""
