"""Starting the parts of a run: each module starts one part where the cluster says."""
