"""What would happen: the loop, the scheduler and the pool of a real run, unchanged, on a virtual clock."""
