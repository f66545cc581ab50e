"""The baseline policies, which consider at most load: the bar for every other policy."""
