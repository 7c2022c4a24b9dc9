"""`feedline audit` compares a feed's rows on one device with its rows in many layouts, also after a kill."""
