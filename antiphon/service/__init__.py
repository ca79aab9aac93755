"""Services outside of a run: the model server."""
