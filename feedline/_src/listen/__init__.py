"""Beside the stages: what each batch cost, what limits a feed, and how a user sees that."""
