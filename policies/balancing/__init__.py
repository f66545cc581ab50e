"""The baseline policies, which consider load or nothing: the bar for every other policy."""
