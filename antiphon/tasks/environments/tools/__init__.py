"""The environment `tools`, its tools and its problems."""
