"""`gateway trace`: look at traces, convert them, take samples, and make them fit to be handed on."""
