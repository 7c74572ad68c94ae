"""Schedules as data: instructions, programs, their generators, lowering and the checker."""
