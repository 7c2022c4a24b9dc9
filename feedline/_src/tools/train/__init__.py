"""`feedline train`, and its data sets.

::

    labelled      a training part and a test part of the digits, or of a user's files
    digits/       handwritten digits that ship with feedline; README.md names their source and licence
"""
