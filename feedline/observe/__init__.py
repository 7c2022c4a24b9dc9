"""What the feed has done so far: statistics."""
