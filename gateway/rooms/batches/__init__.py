"""OpenAI's files and batches, whose lines run on capacity that other requests leave free."""
