"""Where requests wait: in their model's queue, by fair shares of its clients, or for its first replica."""
