"""Grading of transcripts in worker processes, or in the event loop for asynchronous rewards."""
