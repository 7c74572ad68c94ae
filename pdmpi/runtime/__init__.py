"""What a rank does: executor, weight versions, optimizer step, data feed, trainer."""
