"""Text → moments → basis and profile of a converted folder."""
