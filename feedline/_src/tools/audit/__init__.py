"""`feedline audit` runs a feed in many layouts, also after a kill, and compares each row with one device's."""
