"""Chat with a model in its own words: its template, its prompts, and a conversation that keeps its cache."""
