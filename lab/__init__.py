"""The lab: offline work on recorded traffic, and benchmarks. The serving packages do not import it."""
