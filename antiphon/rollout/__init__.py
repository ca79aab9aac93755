"""Producing samples: admission, scheduling, episodes, the engine pool, and the gateway for agents."""
