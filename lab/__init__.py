"""The offline laboratory: what is done with recorded traffic. Nothing that serves imports it."""
