"""An index of each run's attempts in the user's cache. It may be deleted at any time: it is built again."""
