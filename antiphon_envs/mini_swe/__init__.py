"""Mini-SWE: repair a seeded fault in a real Python package."""
