"""The record of a run: ledger, trajectories, checkpoints, events, metrics; one reader for everything that looks at them."""
