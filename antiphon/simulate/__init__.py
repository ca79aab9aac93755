"""Simulated runs in virtual time: engines, learner, environments, faults, and the planner that predicts real runs."""
