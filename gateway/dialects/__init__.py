"""What clients and engines exchange in OpenAI's and Anthropic's formats: events, usage, texts, errors."""
