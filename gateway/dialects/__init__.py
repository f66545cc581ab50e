"""What clients and engines write to each other, in OpenAI's and Anthropic's formats: events, usage, texts, errors."""
