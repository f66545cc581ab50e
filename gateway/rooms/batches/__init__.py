"""Batches: OpenAI's files and batches, whose lines run in what the requests of others leave."""
