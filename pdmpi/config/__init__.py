"""Typed run configuration, read from TOML."""
