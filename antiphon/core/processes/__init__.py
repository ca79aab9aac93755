"""Child processes: starting and ending them, a forkserver, and framed messages between processes."""
