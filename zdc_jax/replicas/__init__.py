"""Several engines of one model, served by one HTTP server."""
