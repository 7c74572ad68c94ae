"""Discrete-event simulation of programs, timelines, drawings, traces."""
