"""`feedline audit` compares the rows of a feed on one device with its rows in many layouts, also after a kill."""
