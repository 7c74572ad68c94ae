"""The torch side of the graph: build, trace, slice, measure."""
