"""What the hop through a gateway costs: CPU time, added latency, memory; beside peers, in the same run."""
