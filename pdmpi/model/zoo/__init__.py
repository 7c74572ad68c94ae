"""Models of the papers, by their standard names."""
