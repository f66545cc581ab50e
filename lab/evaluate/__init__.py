"""Off-policy evaluation: what another policy would have done, from the log alone."""
