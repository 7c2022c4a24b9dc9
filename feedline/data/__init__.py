"""The data that ships with feedline: `digits/`, what `feedline train` learns unless told otherwise."""
