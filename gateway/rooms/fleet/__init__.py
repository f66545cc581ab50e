"""The number of replicas of each method that the traffic needs."""
