"""Models divided among ranks: tensor, expert, pipeline and fully sharded parallelism."""
