"""How many replicas of which method the traffic needs."""
