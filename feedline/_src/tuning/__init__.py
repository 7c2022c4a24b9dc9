"""Settings that a feed finds while it trains: what to try, and what to keep. Pure."""
