"""Text to a `.bin/.idx` dataset: input units, worker processes, a workspace that survives a kill."""
