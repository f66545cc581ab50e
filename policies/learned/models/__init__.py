"""The models behind a prediction: acceptance, length, step time, backlog and prefix cache."""
