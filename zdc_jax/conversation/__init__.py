"""Chat: templates, prompts from messages, and conversations that keep their cache."""
