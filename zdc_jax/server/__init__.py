"""HTTP server with an OpenAI-compatible API, on top of an engine."""
