"""Model calls of an agent whose sandbox has no network: they travel through a log file, in ROCK's format."""
