"""Off-policy evaluation: estimates from a log how another policy would have done."""
