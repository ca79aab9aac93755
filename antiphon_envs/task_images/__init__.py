"""Published software tasks: SWE-bench, Terminal-Bench and Harbor, each task in an image of its own."""
