"""What `feedline train` can learn.

::

    labelled      a training part and a test part: the digits, a user's files, made-up rows
    holdout       every fifth row as the test part
    digits/       handwritten digits that ship with feedline; README.md tells their source and licence
    make_digits   made them
"""
