"""The measurements of `feedline bench`: each file answers one question."""
