"""A guardrail and outlier ejection around any policy."""
