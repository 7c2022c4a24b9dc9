"""Observes the stages of a feed: what each batch cost, what limits the feed, and how a user sees that."""
