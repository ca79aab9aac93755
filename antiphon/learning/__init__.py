"""Consuming samples: training steps, and the learners that do the updates."""
