"""From what a user asks for to a running pipeline: the one room that composes all stages."""
