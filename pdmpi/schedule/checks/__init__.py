"""What must hold of a program, one file a concern; `pdmpi.schedule.check` runs them all."""
