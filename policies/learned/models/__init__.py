"""The fitted parts of a prediction: acceptance, length, step time, backlog and prefixes."""
